"""What `--help` shows below a command's options: how it is used, and what its exit codes say.

Owns the texts. Invariant: one for each command of main.py, and "" for the program itself.
"""

EXIT_HELP = """exit codes:
  0 done   1 the answer is no   2 wrong arguments or configuration   3 no daemon answers
  4 the daemon refused the call   6 the daemon cannot start here   130 interrupted"""

EXAMPLES = {
    "": """examples:
  kvstored serve --memory 4GiB              run a daemon in the default directory
  kvstored status                           what it holds, and how it is used
  kvstored top                              the same, refreshed
  kvstored stop                             end it; its blocks stay for the next one

"""
    + EXIT_HELP,
    "serve": """examples:
  kvstored serve --dir /run/kvstored --memory 4GiB
  kvstored serve --config /etc/kvstored/kvstored.toml --print-config
  kvstored serve --memory 8GiB --namespaces default=0.75,batch=0.25 --metrics-port 9464
  kvstored serve --namespaces default:writers=alice+@llm:readers=@analysts
  KVSTORED_MEMORY=2GiB kvstored serve

A value comes from the flag, else from KVSTORED_<FIELD>, else from the file (TOML, the same field
names), else from its default. BYTES are a number or, for example, 512MiB, 4GiB. A variable that is nearly
a field's name is refused, as an unknown field of the file is; any other that begins with KVSTORED_ and
names nothing is logged. SIGTERM and SIGINT stop the daemon; its blocks stay in shared memory for the next
one, unless --discard is given. A daemon with another --memory, --max-blocks or --namespaces starts empty.

"""
    + EXIT_HELP,
    "ping": """examples:
  kvstored ping                 exit code 0 if a namespace serves, 1 if none does, 3 if nobody answers
  kvstored ping --json""",
    "describe": """examples:
  kvstored describe $KEY        exit code 1 if it is not there""",
    "pools": """examples:
  kvstored pools                every pool, its size, its owner and whether a process uses it
  kvstored pools --remove       removes those that no daemon, no directory and no process owns

Needs no daemon. A pool belongs to the runtime directory whose daemon made it, and waits there for the next
one. If that directory is gone and no process has the pool open, nobody owns it. A user sees whose other
users' pools are, and removes only its own; root removes all.""",
    "status": """examples:
  kvstored status
  kvstored status --sessions
  kvstored status --json | jq .namespaces""",
    "ls": """examples:
  kvstored ls
  kvstored ls --prefix a1b2 --limit 1000 --json
  kvstored ls --key $KEY        one block; exit code 1 if it is not there""",
    "rm": """examples:
  kvstored rm 5f0c…             64 hexadecimal digits; exit code 1 if one was not there
  kvstored ls --prefix a1 --limit 100000 --quiet | xargs -r kvstored rm""",
    "flush": """examples:
  kvstored flush --yes
  kvstored flush --namespace batch --yes""",
    "revoke": """examples:
  kvstored status --sessions    who holds how much, for whom
  kvstored revoke 17            exit code 1 if there is no such session

Memory is not taken from a process. Its client gives back what nobody has an array of, at its next get, and
its views say BlockLost from then on. What stays comes back when the arrays go, or the process ends.""",
    "drain": """examples:
  kvstored drain                wait until nobody writes; then, for example, kvstored stop
  kvstored drain --off""",
    "scrub": """examples:
  kvstored scrub                exit code 1 if a block was corrupt
  kvstored scrub --json""",
    "fsck": """examples:
  kvstored fsck /var/lib/kvstored           headers and every layer of every block
  kvstored fsck --no-layers --json DIR
  kvstored fsck --repair --keep-corrupt DIR

Needs no daemon. Without --repair nothing changes, and a daemon may run: its temporary files are then
reported as left over. --repair removes corrupt and misplaced blocks and leftovers, and nothing whose name
is not ours. A block that cannot be opened (permissions, too many open files), or of which a read fails, may
be good: it is told as unopened or unreadable, counts as wrong, and stays. Exit code 1 if
something is wrong and was not repaired.""",
    "top": """examples:
  kvstored top --interval-s 0.5
  kvstored top --once           one look, for scripts

Until Ctrl-C, which ends it with exit code 0, or until the daemon ends: exit code 3.""",
    "stop": """examples:
  kvstored stop                 SIGTERM, and wait until the daemon is gone; says what stays
  kvstored stop --discard       and free its memory; exit code 1 if some of it stays""",
    "layouts": """examples:
  kvstored layouts
  kvstored layouts --namespace batch --json

A layout says how the bytes of a block are arranged: one for each model, type and block size. A namespace has
places for 512. When all are taken, one without blocks in memory gives up its place; where all have blocks,
those of the one that was used longest ago are evicted.""",
    "peers": """examples:
  kvstored peers                exit code 1 if one is not up""",
    "push": """examples:
  kvstored push --to b 5f0c…    64 hexadecimal digits; exit code 4 if b is not there or takes nothing
  kvstored ls --limit 100000 --quiet | xargs -r kvstored push --to b

Host b comes for the blocks before anybody asks for them there, if its namespace has share = "read-write".
What the daemon does not have costs a moment. Exit code 1 if some were left out: thousands wait for b.""",
    "config": """examples:
  kvstored config               each value and where it came from""",
    "reload": """examples:
  kvstored reload               after the configuration file was changed; SIGHUP does the same
  kvstored reload --json

The daemon reads its file again and applies what may change at run time; what needs a restart is named. A
file that is wrong is refused whole (exit code 4), and the configuration before stays in effect.""",
    "completion": """examples:
  kvstored completion bash > /etc/bash_completion.d/kvstored
  kvstored completion zsh > ~/.zfunc/_kvstored""",
}
