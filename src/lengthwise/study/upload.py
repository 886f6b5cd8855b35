"""Finished runs copied to remote storage, such as s3://bucket/study, by fsspec.

A run in progress is local: its folder lives by atomic renames, which no object store has. What is uploaded is finished
and read-only: config, metrics, maps and the final model, without checkpoints. The seal of the final model goes last, so
that a copy is whole or not yet one.
"""

from lengthwise.data.storage import open_storage
from lengthwise.runs import CHECKPOINTS, FINAL, LOCK, SEAL, Run


def upload_run(run: Run, target: str) -> str:
    """Copy a finished run below `target`, unless it is there; its address."""
    system, root = open_storage(target, "--upload")
    address = f"{root}/{run.name}"
    seal, remote_seal = run.final / SEAL, f"{address}/{FINAL}/{SEAL}"
    if system.exists(remote_seal):
        if system.cat_file(remote_seal) == seal.read_bytes():
            return address
        # That of an earlier training: while files of this one replace its own, the copy is not whole.
        system.rm_file(remote_seal)
    files = [path for path in sorted(run.folder.rglob("*")) if path.is_file() and path.name != LOCK and path != seal]
    for path in [*(p for p in files if CHECKPOINTS not in p.relative_to(run.folder).parts), seal]:
        copy = f"{address}/{path.relative_to(run.folder).as_posix()}"
        system.makedirs(copy.rpartition("/")[0], exist_ok=True)
        system.put_file(str(path), copy)
        if system.size(copy) != path.stat().st_size:
            raise OSError(f"{copy} must have {path.stat().st_size} bytes, got {system.size(copy)}; upload it again")
    return address
