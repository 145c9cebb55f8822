"""What is fed to a container's shell before the job: its variables, and for logins its keys and sshd."""

import secrets
import shlex

from envbuild.run.launch.hosts import Node
from envbuild.run.launch.job import Job

FOLDER = "/run/envbuild"
"""Where a container keeps what the launch puts into it."""
NO_SSHD = 97
"""Exit code of the set-up where the image has no sshd; no shell or docker gives it."""


def hostfile_text(job: Job) -> str:
    """Return the hostfile that the launcher in the first container reads."""
    return "".join(f"{node.name} slots={node.slots}\n" for node in job.nodes)


def feed(path: str, text: str, mode: str = "600") -> str:
    """Return the shell lines that write `text` to a file of the container; a marker that is drawn ends the text."""
    marker = f"END-{secrets.token_hex(8)}"
    return f"cat > {path} <<'{marker}'\n{text.rstrip(chr(10))}\n{marker}\nchmod {mode} {path}\n"


def variables_script(job: Job, environment: dict[str, str]) -> str:
    """Return the shell script that puts the job's variables into a container; every process of the job reads them there.

    It is fed to `sh -s` in the container, so that no value shows on a command line.
    """
    exports = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.master_port)} | environment
    # Open MPI warns of an exported variable that is not set; the loader takes an empty one as none.
    lines = [
        'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"',
        *(f"export {n}={shlex.quote(v)}" for n, v in exports.items()),
    ]
    return f"set -eu\numask 077\nmkdir -p {FOLDER}\nchmod 755 {FOLDER}\n" + feed(
        f"{FOLDER}/environment", "\n".join(lines)
    )


def login_script(job: Job, node: Node, *, private_key: str, public_key: str) -> str:
    """Return the shell script that makes a container ready for logins; its last line of output is the public host key.

    It is fed to `sh -s` in the container after `variables_script`, so that no key shows on a command line.
    """
    listen = f"-o ListenAddress={node.name}" if node.is_address else ""
    config = (
        f"Host *\n  Port {job.ssh_port}\n  IdentityFile {FOLDER}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {FOLDER}/known_hosts\n"
        "  StrictHostKeyChecking yes\n  LogLevel ERROR\n"
    )
    return f"""for tool in sshd ssh ssh-keygen; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null || {{ echo "envbuild: $tool is missing in the image" >&2; exit {NO_SSHD}; }}
done
mkdir -p ~/.ssh
# root's sshd gives up its rights in there; a user's, as in Apptainer, has none to give up
if [ "$(id -u)" -eq 0 ]; then mkdir -p /run/sshd && chmod 755 /run/sshd; fi
{feed(f"{FOLDER}/key", private_key)}{feed(f"{FOLDER}/authorized_keys", public_key)}{feed(f"{FOLDER}/hostfile", hostfile_text(job), "644")}{feed("~/.ssh/config", config)}. {FOLDER}/environment
# A login starts with an empty environment: it gets the image's, except what belongs to one session, and what spans lines.
env | grep -E '^[A-Za-z_][A-Za-z0-9_]*=' | grep -vE '^(HOME|PWD|OLDPWD|SHLVL|TERM|HOSTNAME|_)=' > ~/.ssh/environment || true
ssh-keygen -q -t ed25519 -N '' -f {FOLDER}/host_key </dev/null
"$(PATH="$PATH:/usr/sbin:/sbin" command -v sshd)" -f /dev/null -p {job.ssh_port} {listen} -h {FOLDER}/host_key -o AuthorizedKeysFile={FOLDER}/authorized_keys \\
    -o PidFile={FOLDER}/sshd.pid -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no \\
    -o KbdInteractiveAuthentication=no -o PermitUserEnvironment=yes -o StrictModes=no -o UsePAM=no -o MaxStartups=1000
cut -d' ' -f1,2 {FOLDER}/host_key.pub
"""
