"""Options: how a config declares one, and how every command parses them.

A config is a dataclass whose fields are made by `option`; `OptionParser.add_config` turns it into options of a command.
Options are spelled with dashes; underscores are accepted. A list is given as words, `--lengths 128 256`, or as one word
of JSON, `--lengths '[128, 256]'`. An error is one line and the exit code 2.
"""

import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import field, fields
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from jsonargparse import ActionYesNo, ArgumentParser, Namespace

TYPE_NAMES = {int: "an int", float: "a number", str: "a string", type(None): "null"}


def option(default: Any, text: str, *, alias: str | None = None) -> Any:
    """A field of a config with its line for --help; a list or dictionary is made anew for every config.

    `alias` is another name of it on the command line, for one that Python cannot have.
    """
    metadata = {"help": text, "alias": alias}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class CommandFailed(SystemExit):
    """Exit code 2, after an error that the user can fix; its text is the line on stderr."""

    def __init__(self, line: str) -> None:
        super().__init__(2)
        self.line = line

    def __str__(self) -> str:
        return self.line


def fail(command: str, message: str) -> NoReturn:
    """End a command with one line on stderr; the errors of libraries may have several."""
    line = f"{command}: {' '.join(message.split())}"
    print(line, file=sys.stderr)
    raise CommandFailed(line)


class OptionParser(ArgumentParser):
    """jsonargparse's parser with the spelling and the errors of this package."""

    def __init__(self, **options: Any) -> None:
        self.option_types: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        super().__init__(print_config="--print-config", **options)

    def add_config(self, config: type, *, skip: Collection[str] = ()) -> None:
        """An option for each field of a config except those to skip, flat."""
        self.add_class_arguments(config, as_group=False, skip=set(skip))
        types = get_type_hints(config)
        own = [field for field in fields(config) if field.name not in skip]
        added = {field.name: field.metadata.get("help") for field in own}
        aliases = {field.name: field.metadata["alias"] for field in own if field.metadata.get("alias")}
        for action in self._actions:
            if action.dest in added:
                action.help = added[action.dest]
                self.option_types[action.option_strings[0]] = types[action.dest]
                if action.dest in aliases:
                    self.aliases[f"--{aliases[action.dest]}"] = action.option_strings[0]

    def add_argument(self, *names: str, **options: Any) -> Any:
        """As argparse's: with dashes, and --name / --no-name for a bool."""
        # jsonargparse adds --print_shtab itself at every parsing, unless an option is called so.
        spelled = tuple(re.sub("^--(?!print_shtab).*", lambda n: n[0].replace("_", "-"), name) for name in names)
        action = options.get("action")
        kind = options.get("type", str if action in (None, "config") else bool if action == "store_true" else None)
        self.option_types |= dict.fromkeys(spelled, kind)
        if kind is bool and action is None:
            options = {key: value for key, value in options.items() if key != "type"}
            options["action"] = ActionYesNo(no_prefix="no-")
        return super().add_argument(*spelled, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **options: Any
    ) -> Namespace:
        """Parse the words of a command line."""
        words = self._with_lists(sys.argv[1:] if args is None else args)
        try:
            parsed: Namespace = super().parse_args(words, namespace, **options)
        except UnicodeDecodeError as error:
            got = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            raise ValueError(f"a config must be UTF-8, got {got} ({error.reason})") from None
        return parsed

    def _with_lists(self, words: Sequence[str]) -> list[str]:
        """The words with the full names of options, with dashes, and those of a list as one word of JSON."""
        rewritten: list[str] = []
        elements: list[str] | None = None
        for word in [*words, "--"]:
            is_option = word.startswith("-") and not re.fullmatch(r"-[\d.].*", word)
            if elements is not None and not is_option:
                elements.append(word)
                continue
            if elements is not None:
                rewritten += _as_list(elements, _element_type(self.option_types[rewritten[-1]]))
                elements = None
            # Only the option's own name: keys of dictionaries, as in --sizes.n_layer, have underscores.
            word = re.sub(r"^--[^.=]+", lambda name: name[0].replace("_", "-"), word)
            name, sign, value = word.partition("=")
            name = self.aliases.get(name, name)
            word = name + sign + value
            if _element_type(self.option_types.get(name)) is not None:
                word, elements = name, [value] if sign else []
            rewritten.append(word)
        return rewritten[:-1]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One line instead of a page of usage."""
        parser = getattr(ex, "subcommand_parser", None) or self
        fail(parser.prog.replace(" [options]", ""), parser.plain_error(message))

    def plain_error(self, message: str) -> str:
        """jsonargparse's message as "--steps must be an int or null, got 'many'", where it is about a value."""
        key = re.search(r'Parser key "([\w.]+)"', message)
        value = re.search(r"(?:Given|Got) value: (.*)", message)
        if key is None or value is None:
            return message
        name = "--" + key[1].rpartition(".")[2].replace("_", "-")
        kind = self.option_types.get(name)
        return message if kind is None else f"{name} must be {_type_name(kind)}, got {value[1]!r}"


def _element_type(kind: Any) -> Any:
    """int for list[int] and list[int] | None; None for what is not a list."""
    if get_origin(kind) is list:
        return get_args(kind)[0]
    if isinstance(kind, UnionType) and str not in get_args(kind):
        return next((e for part in get_args(kind) if (e := _element_type(part)) is not None), None)
    return None


def _as_list(words: list[str], kind: Any) -> list[str]:
    if len(words) == 1 and (words[0].startswith("[") or words[0] == "null"):
        return words
    return [f"[{', '.join(json.dumps(word) if kind is str else word for word in words)}]"] if words else []


def _type_name(kind: Any) -> str:
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if isinstance(kind, UnionType):
        return " or ".join(map(_type_name, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list of {_type_name(get_args(kind)[0]).split()[-1]}s"
    if get_origin(kind) is dict:
        return "a dictionary"
    if get_args(kind):  # a Literal
        return " or ".join(map(repr, get_args(kind)))
    return str(getattr(kind, "__name__", kind))
