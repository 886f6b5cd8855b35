"""transformers' own common model tests, run over our model.

Run by test_model_transformers.py, or by hand: `python tests/prove_transformers.py kerple encoder`. No file of theirs is
in this repository: they come with the source distribution of the installed version, which pip downloads once. It has no
tests of `generate`; name the `tests` folder of a checkout in LENGTHWISE_TRANSFORMERS_TESTS to run those too.
"""

import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from lengthwise.model import (
    LengthwiseConfig,
    LengthwiseEncoder,
    LengthwiseEncoderConfig,
    LengthwiseForCausalLM,
    LengthwiseForMaskedLM,
    LengthwiseForSequenceClassification,
    LengthwiseModel,
)

EXCEPTIONS = {
    "test_sdpa_can_dispatch_non_composite_models": "it expects sdpa where none is asked for; ours is the default then",
}
"""Tests that cannot pass, by name, with the reason."""

PACKAGE = "transformers_tests"
NOT_SHIPPED = {
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}
"""What their common tests import and their source distribution leaves out: empty here."""


class NoSourceError(OSError):
    """pip could not bring their tests."""


def tests_folder() -> Path:
    """The `tests` folder of the installed transformers."""
    if named := os.environ.get("LENGTHWISE_TRANSFORMERS_TESTS"):
        return Path(named)
    version = transformers.__version__
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lengthwise"
    folder = cache / f"transformers-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as new:
            _pip(new, "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", f"transformers=={version}")
            with tarfile.open(next(Path(new).glob("*.tar.gz"))) as source:
                source.extractall(new, filter="data")
            # In their repository it is a package, which one of their modules looks up.
            (Path(new) / folder.name / "tests" / "__init__.py").touch()
            _pip(new, "install", "--no-deps", f"--target={folder.name}", "parameterized")
            try:
                (Path(new) / folder.name).rename(folder)
            except OSError:
                # Another process may have been faster.
                if not folder.is_dir():
                    raise
    return folder / "tests"


def _pip(where: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True)
    if done.returncode:
        raise NoSourceError(f"pip {arguments[0]} failed: {done.stderr.strip()[-300:]}")


def load(name: str) -> types.ModuleType:
    """A module of their tests by its name, e.g. "test_modeling_common"."""
    if PACKAGE not in sys.modules:
        folder = tests_folder()
        sys.path.append(str(folder.parent))
        _package(PACKAGE, [str(folder)])
        for module, names in NOT_SHIPPED.items():
            if not (folder / f"{module.replace('.', '/')}.py").is_file():
                _package(f"{PACKAGE}.{module.partition('.')[0]}", [])
                sys.modules[f"{PACKAGE}.{module}"] = types.ModuleType(module)
                vars(sys.modules[f"{PACKAGE}.{module}"]).update(names)
    return importlib.import_module(f"{PACKAGE}.{name}")


def _package(name: str, path: list[str]) -> None:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path


KINDS = {
    "causal": (LengthwiseConfig, (LengthwiseModel, LengthwiseForCausalLM)),
    "encoder": (
        LengthwiseEncoderConfig,
        (LengthwiseEncoder, LengthwiseForMaskedLM, LengthwiseForSequenceClassification),
    ),
}
"""Configs and classes by the kind of model."""


class Sizes:
    """What their tests call a model tester: a small config and inputs."""

    is_training = True
    batch_size, seq_length, vocab_size = 13, 7, 99
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, encoding: str, config_class: type[LengthwiseConfig]) -> None:
        self.encoding, self.config_class = encoding, config_class
        self.base_model_class = LengthwiseModel if config_class.causal else LengthwiseEncoder

    def get_config(self) -> LengthwiseConfig:
        return self.config_class(
            vocab_size=self.vocab_size,
            n_positions=512,
            n_embd=self.hidden_size,
            n_layer=self.num_hidden_layers,
            n_head=self.num_attention_heads,
            n_inner=37,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            encoding=self.encoding,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[LengthwiseConfig, dict[str, torch.Tensor]]:
        ids = load("test_modeling_common").ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def make_case(encoding: str, kind: str) -> type[unittest.TestCase]:
    """Their tests, with what they ask of every model's own test class."""
    common = load("test_modeling_common")
    # By these their tests know which model has a head and takes labels.
    modeling_auto.MODEL_MAPPING_NAMES["lengthwise"] = "LengthwiseModel"
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["lengthwise"] = "LengthwiseForCausalLM"
    modeling_auto.MODEL_MAPPING_NAMES["lengthwise_encoder"] = "LengthwiseEncoder"
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES["lengthwise_encoder"] = "LengthwiseForMaskedLM"
    classifier = LengthwiseForSequenceClassification.__name__
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["lengthwise_encoder"] = classifier
    config_class, classes = KINDS[kind]

    generation = (common.GenerationTesterMixin,) if config_class.causal else ()

    class CommonTest(common.ModelTesterMixin, *generation, unittest.TestCase):
        all_model_classes = classes
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            super().setUp()
            if self._testMethodName in EXCEPTIONS:
                self.skipTest(f"excepted: {EXCEPTIONS[self._testMethodName]}")
            self.model_tester = Sizes(encoding, config_class)

        def test_config(self) -> None:
            config = {"encoding": encoding, "n_embd": 32, "n_head": 4}
            load("test_configuration_common").ConfigTester(self, config_class, **config).run_common_tests()

    return CommonTest


class Report(unittest.TestResult):
    """What became of each test, by its name: passed, skipped or failed, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def note(self, test, outcome: str) -> None:
        # A subtest stands for the test that it is part of.
        self.outcomes[getattr(test, "test_case", test)._testMethodName] = outcome

    def startTest(self, test) -> None:  # noqa: N802
        super().startTest(test)
        self.note(test, "passed")

    def addSkip(self, test, reason) -> None:  # noqa: N802
        self.note(test, f"skipped: {reason}")

    def addFailure(self, test, err) -> None:  # noqa: N802
        self.note(test, f"failed: {self._exc_info_to_string(err, test)}")

    addError = addFailure  # noqa: N815

    def addSubTest(self, test, subtest, err) -> None:  # noqa: N802
        if err is not None:
            self.addFailure(test, err)


def main(encoding: str, kind: str = "causal") -> None:
    report = Report()
    unittest.defaultTestLoader.loadTestsFromTestCase(make_case(encoding, kind)).run(report)
    for name, outcome in report.outcomes.items():
        print(json.dumps([name, outcome]))


if __name__ == "__main__":
    main(*sys.argv[1:])
