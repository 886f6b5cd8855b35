"""A process that holds jobs of one revision and runs them on command: one JSON line in, one JSON line out.

{"job": name, "prepare": case}              makes and checks a job: {"wrong": words or null, "samples", "seconds"}
{"job": name, "time": calls, "seconds": s}  runs it so many times, s being about one call: {"seconds": of one call}
{"job": name, "memory": true}               runs it: {"torch": bytes, "resident": bytes or null}
{"drop": true}                              forgets all jobs: {}
"""

import gc
import inspect
import json
import os
import sys
import time
from pathlib import Path

from job import Case, Job
from memory import resident_peak, torch_peak

import lengthwise as lw

WARM = 0.03
"""Seconds below which a call is run once more before the clock starts, to wake threads and caches."""


def main() -> None:
    # Replies keep the pipe to themselves: what anything prints goes to the errors.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jobs: dict[str, Job] = {}
    arguments = list(inspect.signature(lw.attend).parameters)
    print(json.dumps({"source": str(Path(lw.__file__).parents[1]), "arguments": arguments}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), jobs)), file=replies)


def answer(command: dict, jobs: dict[str, Job]) -> dict[str, object]:
    if "drop" in command:
        jobs.clear()
        gc.collect()
        return {}
    if "prepare" in command:
        try:
            jobs[command["job"]] = job = Job(Case(**command["prepare"]))
            wrong, samples = job.check()
        except Exception as error:  # whatever a revision raises is its answer
            return {"wrong": f"{type(error).__name__}: {error}".splitlines()[0], "samples": {}, "seconds": 0.0}
        return {"wrong": wrong, "samples": samples, "seconds": min(seconds(job, 1) for _ in range(2))}
    job = jobs[command["job"]]
    if "memory" in command:
        return {"torch": torch_peak(job.call)[0], "resident": resident_peak(job.call)}
    if command["seconds"] < WARM:
        job.call()
    return {"seconds": seconds(job, command["time"])}


def seconds(job: Job, calls: int) -> float:
    """Of one call, as the mean of some."""
    start = time.perf_counter()
    for _ in range(calls):
        job.call()
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
