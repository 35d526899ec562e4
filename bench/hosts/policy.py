"""What the policy of hosts does among 10, 100 and 1,000 of them: messages, copies and queues.

    make native-tests && python -m bench.hosts.policy [--json FILE]

`build/dev/hosts_policy` (native/bench/hosts_policy.cc) simulates it: the code that chooses peers, keeps what
they told and turns away is the daemon's own, links and time are the simulation's. Nothing is measured by a
clock, so the same figures come each time.
"""

import argparse
import json
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "dev" / "hosts_policy"
COLUMNS = {
    "hosts": "hosts",
    "asks_per_lookup": "messages per look-up",
    "asks_of_nobody": "for what nobody has",
    "worst_queue": "worst queue",
    "most_copies_at_once": "copies of a block at once",
    "hot_copies": "hosts with the hot prompt",
    "hot_spread_s": "after s",
    "lost": "half blocks lost",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args()
    if not PROGRAM.exists():
        parser.error(f"{PROGRAM.name} is not built: run `make native-tests`")
    ran = subprocess.run([str(PROGRAM)], stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    print("| | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for row in rows:
        what = "churn, slow links" if row["hard"] else "calm"
        print(f"| {what} | " + " | ".join(str(row[name]) for name in COLUMNS) + " |")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
