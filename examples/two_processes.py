"""Two processes and a daemon: one computes a document inside its prompt, the other uses it in the middle of
another.

Starts a daemon in a temporary directory, and itself again as the other process. Ends both.
"""

import subprocess
import sys
import tempfile

from side_by_side import ROOT, ask, engine, text_of

DOCUMENT = text_of("docs/design.md", 3000)


def process(label: str, prompt: str) -> None:
    with engine(__doc__, repair="auto") as llm:
        ask(llm, label, prompt)


def main() -> None:
    if "--first" in sys.argv:
        sys.argv.remove("--first")
        return process("the first process", f"Here is a text.\n\n{DOCUMENT}\n\nIn one word:")
    if "--dir" in sys.argv:
        return process("the second process", f"Do as you are told. Read:\n\n{DOCUMENT}\n\nThe title is")
    with tempfile.TemporaryDirectory() as home:
        serve = [sys.executable, "-m", "kvstored", "serve", "--dir", home, "--memory", "512MiB", "--discard"]
        daemon = subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            if not any(" ready " in line for line in daemon.stderr):  # what it logs, until it ends
                raise SystemExit("the daemon did not start")
            again = [sys.executable, __file__, *sys.argv[1:], "--dir", home]
            for own in (["--first"], []):
                subprocess.run([*again, *own], check=True)
        finally:
            daemon.terminate()
            daemon.wait(20)
    return None


if __name__ == "__main__":
    main()
