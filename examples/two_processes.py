"""Two processes and a daemon: one computes a document inside its prompt, the other uses it in the middle of
another.

Starts a daemon in a temporary directory, and itself again as the other process. Ends both.
"""

import subprocess
import sys
import tempfile

import own_daemon
from side_by_side import ask, engine, parser, text_of

DOCUMENT = text_of("execmodel", 4000)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--first", action="store_true", help="be the process that computes the document")
    chosen = options.parse_args()
    if chosen.dir:
        label = "the first process" if chosen.first else "the second process"
        before, after = ("Here is a text.", "In one word:") if chosen.first else ("Read:", "The title is")
        with engine(chosen, repair="auto", block_tokens=32) as llm:
            ask(llm, label, f"{before}\n\n{DOCUMENT}\n\n{after}")
        return
    with tempfile.TemporaryDirectory(prefix="kvstored-example-") as home, own_daemon.running(home):
        again = [sys.executable, __file__, *sys.argv[1:], "--dir", home]
        for arguments in (["--first"], []):
            subprocess.run([*again, *arguments], check=True)


if __name__ == "__main__":
    main()
