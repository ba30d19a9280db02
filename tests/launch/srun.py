"""A stand-in for Slurm's srun on one machine: ``python srun.py -n 2 command ...``, with the variables that srun sets.

As srun with its default, ``--mpi=none``: the tasks share no parent's variables but these, output is passed on, and the
exit code is the highest of the tasks'.
"""

import os
import socket
import subprocess
import sys


def variables(task, tasks, job):
    """What srun gives the task of a step over one machine."""
    host = socket.gethostname()
    step = {"JOB_ID": job, "JOBID": job, "STEP_ID": 0, "STEPID": 0, "LOCALID": task, "PROCID": task, "NODEID": 0}
    step |= {"NTASKS": tasks, "NPROCS": tasks, "STEP_NUM_TASKS": tasks, "STEP_NUM_NODES": 1, "NNODES": 1}
    step |= {"JOB_NUM_NODES": 1, "TASKS_PER_NODE": tasks, "STEP_TASKS_PER_NODE": tasks, "STEP_NODELIST": host}
    step |= {"NODELIST": host, "JOB_NODELIST": host, "SRUN_COMM_HOST": "127.0.0.1", "LAUNCH_NODE_IPADDR": "127.0.0.1"}
    return {f"SLURM_{name}": str(value) for name, value in step.items()}


def main():
    option, number, *command = sys.argv[1:]
    assert option == "-n" and command, sys.argv
    tasks = [
        subprocess.Popen(command, env={**os.environ, **variables(task, int(number), os.getpid())})
        for task in range(int(number))
    ]
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
