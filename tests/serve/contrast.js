// The contrast of the message's placeholder to its field, as WCAG has it.
() => {
    const field = document.querySelector("#message"), context = new OffscreenCanvas(1, 1).getContext("2d");
    const light = color => { context.fillStyle = color; context.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05; };
    const both = [light(getComputedStyle(field).backgroundColor),
                  light(getComputedStyle(field, "::placeholder").color)];
    return Math.max(...both) / Math.min(...both); }
