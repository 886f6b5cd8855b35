"""Options: how a config declares one, and how every command parses them.

A config is a dataclass whose fields are made by `option`; `OptionParser.add_config` turns it into options of a command.
Options are spelled with dashes; underscores are accepted. A list is given as words, `--lengths 128 256`, or as one word
of JSON, `--lengths '[128, 256]'`. An error is one line and the exit code 2.
"""

import difflib
import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import field, fields
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
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
        missing = re.fullmatch(r"the following arguments are required: (\w+)\..*", message)
        if missing and self._subcommands_action is not None:
            parser = self._subcommands_action.choices[missing[1]]
        fault = getattr(ex, "__cause__", None)
        if isinstance(fault, yaml.MarkedYAMLError) and (mark := fault.problem_mark) is not None:
            place = f"line {mark.line + 1}, column {mark.column + 1}"
            message = f"--config must be YAML, got an error in {place}: {fault.problem}"
        fail(parser.prog.replace(" [options]", ""), parser.plain_error(message))

    def plain_error(self, message: str) -> str:
        """jsonargparse's message as "--steps must be an int or null, got 'many'": expected, got, and what to do."""
        for pattern, rewritten in (
            (r"the following arguments are required: (.*)", self._missing),
            (r"unrecognized arguments: (.*)", self._unrecognized),
            (r"Subcommand '\w+' does not accept option '([^.]+).*'", self._unknown_in_config),
            (r"argument \w+: invalid choice: '(.*)' \(choose from (.*)\)", _unknown_command),
            (r"argument ([\w-]+).*: expected one argument", self._without_value),
            (r"argument ([\w-]+).*: ignored explicit argument (.*)", r"\1 is given without a value, got \2"),
            (r'Parser key "config": (.*): (.*)', r"--config must be a YAML file that can be read, got \2: \1"),
            (r"Unexpected config:(.*)", _no_mapping),
            (r"Value not boolean: (.*)\.", r"an option of the config must be true or false, got '\1'"),
        ):
            if match := re.fullmatch(pattern, message.strip(), re.DOTALL):
                return match.expand(rewritten) if isinstance(rewritten, str) else rewritten(match)
        key = re.search(r'Parser key "([\w.]+)"', message)
        value = re.search(r"(?:Given|Got) value: (.*)", message)
        if key is None or value is None:
            return message
        name = "--" + key[1].rpartition(".")[2].replace("_", "-")
        kind = self.option_types.get(name)
        return message if kind is None else f"{name} must be {self._expected(name)}, got {value[1]!r}"

    def _help_of(self, name: str) -> str:
        """The line of an option or a positional argument in --help."""
        return next(str(a.help) for a in self._actions if name in (*a.option_strings, a.dest))

    def _expected(self, name: str) -> str:
        """The type of an option in words; of a dictionary also the example of its line in --help."""
        example = re.search(r"\{.*\}", self._help_of(name))
        words = _type_name(self.option_types[name])
        return words.replace("a dictionary", f"a dictionary such as {example[0]}", 1) if example else words

    def _missing(self, match: re.Match[str]) -> str:
        wanted = []
        for name in (name.rpartition(".")[2] for name in match[1].split(", ")):
            (action,) = (action for action in self._actions if action.dest == name)
            wanted.append(f"{[*action.option_strings, action.metavar][0]} ({action.help})")
        return f"expected {' and '.join(wanted)}, got none"

    def _unrecognized(self, match: re.Match[str]) -> str:
        word = next((word for word in match[1].split() if word.startswith("-")), None)
        if word is None:
            has_words = any(not action.option_strings for action in self._actions)
            expected = "no more words" if has_words else "options, which begin with --"
            return f"expected {expected}, got {match[1]!r}"
        name = word.partition("=")[0]
        return f"unknown option {name}; {_hint(name, self.option_types, f'see {self._command} --help')}"

    def _unknown_in_config(self, match: re.Match[str]) -> str:
        known = [name.removeprefix("--").replace("-", "_") for name in self.option_types]
        return f"unknown option {match[1]!r} in the config; {_hint(match[1], known, f'see {self._command} --help')}"

    def _without_value(self, match: re.Match[str]) -> str:
        return f"{match[1]} must be {self._expected(match[1])}, got none"

    @property
    def _command(self) -> str:
        return str(self.prog).replace(" [options]", "")


def _unknown_command(match: re.Match[str]) -> str:
    known = match[2].replace("'", "")
    return f"unknown COMMAND {match[1]!r}; {_hint(match[1], known.split(', '), f'known: {known}')}"


def _no_mapping(match: re.Match[str]) -> str:
    lines = [line for line in match[1].strip().splitlines() if not line.startswith("#")]
    got = f"{lines[0]!r}" if lines else "an empty file"
    return f"--config must be a YAML mapping from options to values, got {got}"


def _hint(word: str, known: Collection[str], advice: str) -> str:
    """The known name that is nearest, if one is near, and advice."""
    spelled = {name.strip("-"): name for name in known}  # the dashes are alike in all
    near = [spelled[name] for name in difflib.get_close_matches(word.strip("-"), spelled, n=1)]
    return f"did you mean {near[0]!r}? {advice[0].upper()}{advice[1:]}" if near else advice


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
    if get_origin(kind) in (Union, UnionType):  # Literal | None is the former
        return " or ".join(map(_type_name, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list of {_type_name(get_args(kind)[0]).split()[-1]}s"
    if get_origin(kind) is dict:
        return "a dictionary"
    if get_args(kind):  # a Literal
        return " or ".join(map(repr, get_args(kind)))
    return str(getattr(kind, "__name__", kind))
