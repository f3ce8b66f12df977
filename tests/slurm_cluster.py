"""A SLURM cluster of one node, this machine, without accounting: its daemons are processes of the test that uses it.

Debian's packages `slurmctld`, `slurmd`, `slurm-client` and `munge` have the programs. Only root can start them.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "sinfo")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
DEADLINE_S = 60.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=2
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=main Nodes=ALL Default=YES
"""


def missing():
    """Why no cluster can run here; '' if one can."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"SLURM is not installed: there is no {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "SLURM's daemons are started by root"


def eventually(true, what, seconds=DEADLINE_S):
    """Wait until `true()`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"expected {what} within {seconds:.0f} s"
        time.sleep(0.1)


@contextmanager
def cluster(folder):
    """Start the daemons and yield the variables by which SLURM's commands find them; then end jobs and daemons."""
    environment = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def command(*words):
        ended = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False)
        return ended.stdout.strip() if ended.returncode == 0 else None

    def start(name, *options):
        log = stack.enter_context((folder / f"{name}.log").open("w"))
        words = [shutil.which(name, path=PATH), *options]
        process = subprocess.Popen(words, env=os.environ | environment, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)

    def no_jobs():
        return command("squeue", "--noheader") == ""

    with ExitStack() as stack:
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        start("munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in names.items()))
        eventually((folder / "munge.socket").exists, "munged's socket")
        controller_port, node_port = _free_ports()
        text = CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            controller_port=controller_port,
            node_port=node_port,
        )
        (folder / "slurm.conf").write_text(text)
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D")
        eventually(lambda: command("sinfo", "--noheader", "--format=%T") == "idle", "an idle node")
        stack.callback(lambda: eventually(no_jobs, "an empty queue"))
        stack.callback(lambda: command("scancel", "--user=root"))
        yield environment


def _free_ports():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]
