"""A home and a name for a user whom the image does not know; _envbuild_home.pth imports this as Python starts.

OpenShift, Kubernetes and `docker run --user` start a container as a number that /etc/passwd does not list. Docker gives such
a user `/` as home, which it cannot write to, and getpass.getuser, by which torch names a cache, fails.

Each user gets a folder which no other can write to. In one for all, a user could leave compiled code of Triton or torch that
another, root too, then loads; so no variable of the image names one. Root, and whoever has a home, keep what they have.
"""

import os
import pwd

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # in which getpass.getuser looks


def settle(uid):
    if uid == 0:
        return
    if not any(os.environ.get(name) for name in NAMES) and not known(uid):
        os.environ["USER"] = os.environ["LOGNAME"] = f"uid{uid}"
    if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        home = folder_of(uid)
        if home is not None:
            os.environ["HOME"] = home


def known(uid):
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def folder_of(uid):
    """Return this user's folder among the temporary ones; None where there is none to write to."""
    for place in (os.environ.get("TMPDIR") or "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108 - what is found there is looked at
        if not is_safe(place):
            continue
        folder = f"{place}/home-{uid}"
        try:  # noqa: SIM105 - contextlib takes longer to import than all of this
            os.mkdir(folder, 0o700)
        except OSError:
            pass  # another process of this user has made it, or somebody else: the next lines decide
        try:
            found = os.lstat(folder)
        except OSError:
            continue
        # a folder, not a link, and one to which no other user writes
        if found.st_uid == uid and found.st_mode & 0o170022 == 0o040000:
            return folder
    return None


def is_safe(place):
    """Return whether no other user can put another folder in the place of one below `place`."""
    try:
        found = os.stat(place)
    except OSError:
        return False
    shared = found.st_mode & 0o022 and not found.st_mode & 0o1000  # without the sticky bit, anyone moves what is there
    return os.path.isabs(place) and found.st_uid in (0, os.getuid()) and not shared


settle(os.getuid())
