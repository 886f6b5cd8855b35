"""Remote storage, such as s3://bucket/folder, by fsspec: where token files are read from and finished runs go."""

from typing import Any

import fsspec


def open_storage(address: str, name: str) -> tuple[Any, str]:
    """The file system of an address, and the path there; `name` is the option that has it."""
    try:
        system, root = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{name} must be an address that fsspec knows, got {address!r}: {error}") from error
    return system, root.rstrip("/")
