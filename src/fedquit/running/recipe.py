# SPDX-License-Identifier: Apache-2.0
"""A recipe: everything that determines a run, as one short TOML file.

The schema is the classes below: every key of the file is a field, and an unknown key is an error
that names the nearest one. `extends = "other"` starts from another recipe, which may extend one
more; `--set key=value` changes single keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedquit.audit.attacks import ATTACKS
from fedquit.audit.canaries import KINDS
from fedquit.core import ClientId, Local, Training
from fedquit.core.method import Method
from fedquit.data.samples import SELECTIONS
from fedquit.engine.optim import OPTIMIZERS
from fedquit.errors import InputError, UnknownNameError
from fedquit.inference.one_run import DELTA, LEAST_GUESSES, SHARE, default_guesses
from fedquit.inference.trace import MARGIN
from fedquit.utils.names import imported, lookup, unknown

Options = Mapping[str, Any]
Settings = Sequence[str] | Mapping[str, Any]  # changes of a recipe's keys
LEVELS = 2  # of recipes that a recipe may extend, so that a file stays readable
T = TypeVar("T")


@dataclass(frozen=True)
class DataRecipe:
    """Which data, and how it is divided among clients."""

    name: str = "fashion_mnist_mini"  # of `fedquit list datasets`, or package.module:function
    options: Options = field(default_factory=dict)
    folder: str = ""  # where published data lies; $FEDQUIT_DATA or the user's cache folder unless given
    partition: str = "lda"  # iid, lda, chunks, file, owner
    clients: int = 10
    alpha: float = 0.1  # of the Dirichlet distribution, for lda
    partition_file: str = ""
    seed: int = 0  # of the partition
    holdout: float = 0.0  # of each client's data, never trained on
    public: float = 0.0  # of all data, for the server itself
    holdout_by_class: bool = False  # the same share of each class of a client, rather than a random one


@dataclass(frozen=True)
class ModelRecipe:
    """Which network, with which options."""

    name: str = "cnn"
    options: Options = field(default_factory=dict)
    dtype: Literal["float32", "float64"] = "float32"
    batchnorm: Literal["averaged", "local"] = "averaged"  # local: each client keeps its own, as in FedBN


@dataclass(frozen=True)
class TrainRecipe:
    """FedAvg: for Original, for Retrain, and during recovery."""

    rounds: int = 30
    clients_per_round: int = 0  # 0: everybody
    epochs: float = 1.0
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.1
    lr_decay: float = 0.998  # in each round, those of recovery included
    momentum: float = 0.0
    weight_decay: float = 1e-3
    clip: float = 0.0

    def training(self) -> Training:
        """Return the training that these keys describe."""
        from fedquit.core.fedavg import Learn

        local = Local(
            self.epochs, self.batch_size, self.optimizer, self.lr, self.momentum, self.weight_decay, self.clip
        )
        return Training(Learn(local), self.rounds, self.clients_per_round, self.lr_decay)


@dataclass(frozen=True)
class EventRecipe:
    """An erasure request, or a client that joins. Events happen in the order of the file."""

    kind: Literal["forget", "join"] = "forget"
    clients: tuple[ClientId, ...] = ()
    samples: float = 0.0  # the fraction of each client's samples to forget; 0: the whole client leaves
    choose: str = "random"  # which samples: random, or rare (of the least represented local classes)
    anew: bool = False  # join: enrol a client that was forgotten, as a new member
    rounds: int = 1  # join: rounds of training with it


@dataclass(frozen=True)
class RecoverRecipe:
    """When the recovery ends."""

    until: Literal["retrained", "retrained-mean-of-3", "rounds"] = "retrained"
    max_rounds: int = 30  # at most; with until = "rounds", exactly
    budgets: tuple[float, ...] = ()  # also evaluate the model once it has cost these shares of Retrain's bytes
    follow: int = 0  # rounds of ordinary training that are recorded after the recovery's stop, without effect on it
    control: bool = False  # also run Natural for as many rounds as the method took; `fedquit compare` always does
    retrain_longer: bool = False  # let Retrain go on for these rounds, too: both have then trained equally long in all


@dataclass(frozen=True)
class EvaluateRecipe:
    """What is measured beside accuracy and loss."""

    attacks: tuple[str, ...] = tuple(ATTACKS)  # of `fedquit list attacks`
    relearn: int = 0  # epochs in which to learn the forgotten data again, from the recovered model and from Retrain
    backdoor: float = 0.0  # of the training images of the first request's clients, stamped with a trigger; images only
    backdoor_target: int = 0  # the class that the trigger should stand for
    backdoor_size: int = 3  # the side of the stamped square, in pixels
    margin: float = MARGIN  # how far from 0.5 the AUC against the hold-out may lie and still count as forgotten


@dataclass(frozen=True)
class AuditRecipe:
    """Canaries in the data of the first request's clients, for the one-run audit."""

    canaries: int = 0  # of each kind and client; fair coins decide which of them are trained on; 0: no audit
    kind: Literal["natural", "mislabelled", "both"] = "natural"  # as they are, with a wrong label, or some of each
    delta: float = DELTA  # of the statements about epsilon
    guesses: int = 0  # canaries of a client guessed in, and as many guessed out; 0: a tenth of them each

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of canaries."""
        return KINDS if self.kind == "both" else (self.kind,)

    @property
    def k(self) -> int:
        """Guesses of each kind."""
        return self.guesses or default_guesses(self.canaries)


@dataclass(frozen=True)
class EngineRecipe:
    """How the run is computed. The precision changes results; the other keys do so by the order of sums at most."""

    name: str = "auto"  # of `fedquit list engines`
    threads: int = 0  # 0: torch's own choice
    device: str = "auto"  # cpu, cuda, cuda:1, …; auto: a GPU where there is one
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"  # of a float32 network; auto: bf16 on a GPU
    width: int = 0  # clients at once, at most; 0: as many as fit
    compile: Literal["auto", "always", "never"] = "auto"  # steps on a GPU; auto: of networks without kernels of ours


@dataclass(frozen=True)
class Recipe:
    """All that determines a run: one setting, one or more requests, one method.

    Attributes:
        title: of tables and reports.
        seed: of the run; that of the partition is `data.seed`.
        data: which data, and how it is divided among clients.
        model: which network.
        train: ordinary training.
        request: the events, in their order.
        method: the method's name, perhaps a preset, and its hyper-parameters.
        recover: when the recovery ends.
        retrain: whether to train Retrain too, for comparison.
        evaluate: what is measured beside accuracy and loss.
        engine: how the run is computed.
        audit: canaries for the one-run audit.
        retrain_seed: of Retrain, where it is not to share the run's seed.

    Raises:
        InputError: for values that cannot be used.
        UnknownNameError: for a method, optimizer, attack or key that does not exist.
    """

    title: str = ""
    seed: int = 0
    data: DataRecipe = DataRecipe()
    model: ModelRecipe = ModelRecipe()
    train: TrainRecipe = TrainRecipe()
    request: tuple[EventRecipe, ...] = (EventRecipe(clients=(0,)),)
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedquit"})
    recover: RecoverRecipe = RecoverRecipe()
    retrain: bool = True  # train the gold standard too
    evaluate: EvaluateRecipe = EvaluateRecipe()
    engine: EngineRecipe = EngineRecipe()
    audit: AuditRecipe = AuditRecipe()
    retrain_seed: int | None = None  # of Retrain; None: the run's, as in the paper's tables

    def __post_init__(self) -> None:
        method = self.build_method()
        lookup(OPTIMIZERS, self.train.optimizer, "optimizer")
        optimizer = getattr(method, "optimizer", "sgd")
        if optimizer or getattr(type(method), "optimizer", None):  # "" is training's, where it is the default
            lookup(OPTIMIZERS, optimizer, "optimizer")
        _check(self.train.clients_per_round >= 0, "train.clients_per_round must be at least 0 (0: everybody)")
        _check(min(self.train.momentum, self.train.weight_decay) >= 0, "momentum and weight decay must be at least 0")
        _check(self.engine.threads >= 0, "engine.threads must be at least 0 (0: torch's own choice)")
        _check(self.engine.width >= 0, "engine.width must be at least 0 (0: as many clients at once as fit)")
        _check(self.train.rounds >= 1, "train.rounds must be at least 1")
        _check(self.train.batch_size >= 1, "train.batch_size must be at least 1")
        _check(self.train.lr > 0, "train.lr must be above 0")
        _check(self.train.epochs > 0, "train.epochs must be above 0")
        _check(self.data.clients >= 2, "data.clients must be at least 2")
        _check(0 <= self.data.holdout < 1, "data.holdout must be at least 0 and below 1")
        _check(0 <= self.data.public < 1, "data.public must be at least 0 and below 1")
        _check(self.recover.max_rounds >= 0, "recover.max_rounds must be at least 0")
        _check(self.recover.follow >= 0, "recover.follow must be at least 0 rounds")
        _ = self.train.training()
        _check(all(0 < b <= 1 for b in self.recover.budgets), "recover.budgets must lie above 0 and at most at 1")
        _check(self.retrain or not self.recover.budgets, "budgets are shares of Retrain's cost; set retrain = true")
        _check(self.evaluate.relearn >= 0, "evaluate.relearn must be at least 0 epochs")
        _check(0 < self.evaluate.margin < 0.5, "evaluate.margin must lie above 0 and below 0.5")
        _check(0 <= self.evaluate.backdoor <= 1, "evaluate.backdoor must lie between 0 and 1 (0: none)")
        whole = [event.kind == "forget" and not event.samples for event in self.request[:1]]
        _check(
            not self.evaluate.backdoor or whole == [True],
            "evaluate.backdoor is planted by clients that leave whole, and the first request is not of such; drop one",
        )
        self._check_audit(whole=whole == [True])
        single = "of one model, and with local BatchNorm each client has its own; leave out one"
        local = self.model.batchnorm == "local"
        _check(not (local and self.evaluate.relearn), f"evaluate.relearn is {single}")
        _check(not (local and self.evaluate.backdoor), f"evaluate.backdoor is {single}")
        _check(not (local and self.audit.canaries), f"audit.canaries are {single}")
        for attack in self.evaluate.attacks:
            lookup(ATTACKS, attack, "attack")
        _check(len(self.request) > 0, "a recipe needs at least one [[request]]")
        _check(
            self.retrain or self.recover.until == "rounds",
            'recovery until Retrain\'s accuracy needs a Retrain; set recover.until = "rounds" or retrain = true',
        )
        for event in self.request:
            _check(0 <= event.samples < 1, "request.samples must be at least 0 and below 1 (0: the whole client)")
            lookup(SELECTIONS, event.choose, "selection of samples")
            _check(event.rounds >= 1, "the rounds after a join must be at least 1")

    def _check_audit(self, *, whole: bool) -> None:
        spec = self.audit
        _check(min(spec.canaries, spec.guesses) >= 0, "audit.canaries and audit.guesses must be at least 0")
        _check(0 <= spec.delta < 1, "audit.delta must be at least 0 and below 1")
        if not spec.canaries:
            return
        _check(
            spec.k >= LEAST_GUESSES,
            f"the audit guesses {spec.k} canaries in and {spec.k} out, which can show nothing; set audit.canaries to "
            f"{LEAST_GUESSES * SHARE} or more, or audit.guesses to {LEAST_GUESSES} or more",
        )
        _check(2 * spec.k <= spec.canaries, "audit.guesses must be at most half of audit.canaries")
        _check(whole, "audit.canaries are of clients that leave whole, and the first request is not of such; drop one")

    @property
    def method_name(self) -> str:
        """The method's name in `fedquit.methods.METHODS`, or `package.module:class`."""
        return str(self.method.get("name", "fedquit"))

    def build_method(self) -> Method:
        """Return the method with its hyper-parameters: the keys of [method] are its fields."""
        from fedquit.methods import METHODS

        name = self.method_name
        cls = imported(name, "method") if ":" in name else lookup(METHODS, name, "method")
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise UnknownNameError(f"{name!r} is not a method: it must be a class derived from fedquit.core.Method.")
        preset = self.method.get("preset")
        changes = lookup(cls.presets, str(preset), f"preset of method {name!r}") if preset else {}
        given = {k: v for k, v in self.method.items() if k not in ("name", "preset")}
        return build(cls, {**changes, **given}, "method")

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, for JSON; `build(Recipe, …)` reads it back."""
        plain: dict[str, Any] = _jsonable(dataclasses.asdict(self))
        del plain["data"]["folder"]  # where data lies is not part of an experiment
        return plain

    @property
    def hash(self) -> str:
        """A short name of all that it says; of a partition file it knows the name alone."""
        return hash_of(self.to_dict(), type(self))


def hash_of(recipe: Mapping[str, Any], schema: type = Recipe) -> str:
    """The hash of a recipe in plain values, as a record holds it.

    Args:
        recipe: What `Recipe.to_dict` returns, or what a record of any version holds.
        schema: The class whose fields are the recipe's keys.

    Returns:
        16 hexadecimal digits.
    """
    data = {**recipe["data"], "partition_file": Path(recipe["data"]["partition_file"]).name}
    hashed = without_later_defaults({**recipe, "data": data}, schema)
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# The keys of schema 1, by section. They are always part of a recipe's hash; never add one. A key that is added to the
# classes above enters the hash only where it differs from its default, so that older recipes keep theirs.
FIRST_KEYS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        ("title", "seed", "data", "model", "train", "request", "method", "recover", "retrain", "evaluate", "engine")
    ),
    "data": frozenset(
        ("name", "options", "partition", "clients", "alpha", "partition_file", "seed", "holdout", "public")
    ),
    "model": frozenset(("name", "options", "dtype")),
    "train": frozenset(
        (
            *("rounds", "clients_per_round", "epochs", "batch_size", "optimizer"),
            *("lr", "lr_decay", "momentum", "weight_decay", "clip"),
        )
    ),
    "request": frozenset(("kind", "clients", "samples", "choose", "anew", "rounds")),
    "recover": frozenset(("until", "max_rounds", "budgets")),
    "evaluate": frozenset(("attacks", "relearn", "backdoor", "backdoor_target", "backdoor_size")),
    "engine": frozenset(("name", "threads", "device", "precision", "width")),
}
# The defaults that such keys had before, by section and key: records that say them keep their hash, too.
FORMER_DEFAULTS: Mapping[tuple[str, str], Any] = {("engine", "compile"): "never"}


def without_later_defaults(plain: Mapping[str, Any], schema: type = Recipe, section: str = "") -> dict[str, Any]:
    """A recipe, or one section of it, without the keys that were added after schema 1 and have their default.

    Args:
        plain: The recipe in plain values; keys that `schema` does not know are kept.
        schema: The dataclass whose fields are its keys.
        section: The section's name; empty for the whole recipe.

    Returns:
        The values that enter the hash.
    """
    hints = get_type_hints(schema)
    known = {f.name: f for f in fields(schema)}
    first = FIRST_KEYS.get(section, frozenset())
    hashed: dict[str, Any] = {}
    for key, value in plain.items():
        inner = _section_class(hints.get(key))
        if inner and isinstance(value, Mapping):
            part: Any = without_later_defaults(value, inner, key)
            differs = bool(part)
        elif inner and isinstance(value, list):
            part = [without_later_defaults(entry, inner, key) for entry in value]
            differs = bool(part)
        else:
            part = value
            differs = value != _default(known.get(key)) and value != FORMER_DEFAULTS.get((section, key))
        if key in first or differs:
            hashed[key] = part
    return hashed


def _section_class(hint: Any) -> type | None:  # noqa: ANN401 - any annotation
    """The dataclass behind a section, or behind each entry of a list of sections."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _default(key: dataclasses.Field[Any] | None) -> Any:  # noqa: ANN401 - of any type
    """A key's default in plain values; of a key that has none or is unknown, what equals no value."""
    if key is None:
        return dataclasses.MISSING
    if key.default_factory is not dataclasses.MISSING:
        return _jsonable(key.default_factory())
    return _jsonable(key.default)


def _jsonable(value: Any) -> Any:  # noqa: ANN401 - by nature
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value  # JSON has no infinity


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise InputError(f"{sentence}: correct the recipe.")


def packaged() -> list[str]:
    """Return the names of the packaged recipes, such as `demo` and `settings/cifar100-lda`."""
    return sorted(_named(resources.files("fedquit") / "recipes"))


def _named(folder: Traversable) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in _named(entry))
        elif entry.name.endswith(".toml"):
            yield entry.name.removesuffix(".toml")


def load(where: str, settings: Settings = ()) -> Recipe:
    """Read a recipe.

    Args:
        where: a file that ends in .toml, or the name of a packaged recipe.
        settings: changes of single keys, each as `key=value`, such as `method.lr=3e-4`, or as a mapping such as
            `{"method.lr": 3e-4}`.

    Raises:
        InputError: if the file cannot be read or holds values that cannot be used.
        UnknownNameError: for a recipe, key or name that does not exist.
    """
    content = _read(where)
    at = where
    chain = [where]
    while (base := content.pop("extends", None)) is not None:
        neighbour = Path(at).parent / str(base)
        at = str(neighbour) if neighbour.suffix == ".toml" else str(base)
        chain.append(at)
        if len(chain) > LEVELS + 1:
            raise InputError(f"{' extends '.join(chain)}: at most {LEVELS} recipes may lie below one; join some.")
        content = _merged(_read(at), content)
    content.setdefault("request", [{}])
    _change(content, settings)
    return build(Recipe, content, "recipe")


def changed(recipe: Recipe, settings: Settings) -> Recipe:
    """A recipe with other values of single keys.

    Args:
        recipe: the recipe.
        settings: as `load` takes them.

    Raises:
        InputError: for values that cannot be used.
        UnknownNameError: for a key or name that does not exist.
    """
    content = recipe.to_dict()
    content["data"]["folder"] = recipe.data.folder
    _change(content, settings)
    return build(Recipe, content, "recipe")


def _change(content: dict[str, Any], settings: Settings) -> None:
    if isinstance(settings, Mapping):
        pairs = [(key, _jsonable(value)) for key, value in settings.items()]
    else:
        pairs = [parse_setting(setting) for setting in settings]
    for key, value in sorted(pairs, key=lambda pair: pair[0] != "method.name"):  # a new method, then its keys
        _set(content, key, value)


def _read(where: str) -> dict[str, Any]:
    path = Path(where)
    if where in packaged():
        text = (resources.files("fedquit") / "recipes" / f"{where}.toml").read_text(encoding="utf-8")
    elif path.suffix != ".toml":
        if path.exists():
            raise InputError(f"the recipe {path} does not end in .toml: rename it.")
        raise _unknown_recipe(where)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the recipe {path} ({error}): check the path.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the recipe {path} is not valid TOML: {error}.") from error


def _unknown_recipe(name: str) -> UnknownNameError:
    """Make the error; there are too many recipes to list them in it."""
    near = difflib.get_close_matches(name, packaged(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownNameError(f"unknown recipe {name!r}: {hint}`fedquit list recipes` names them all.")


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    if "method" in above and above["method"].get("name") not in (None, out.get("method", {}).get("name")):
        out.pop("method", None)  # the settings of one method mean nothing to another
    for key, value in above.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def parse_setting(setting: str) -> tuple[str, Any]:
    """Read `key=value`; the value is TOML, and a bare word is a string.

    Raises:
        InputError: where there is no value.
    """
    key, equals, text = setting.partition("=")
    if not equals:
        raise InputError(f"--set {setting!r} has no value: write key=value, for example method.lr=3e-4.")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def _set(content: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - of any key
    setting = f"{key}={value}"
    *folders, last = key.strip().split(".")
    if key == "method.name" and content.get("method", {}).get("name") != value:
        content["method"] = {}
    at: Any = content
    for folder in folders:
        if isinstance(at, list):  # request.0.clients=[1]
            at = _entry(at, folder, key)
            continue
        if not isinstance(at, dict):
            raise InputError(f"--set {setting!r}: what is before {folder!r} is a value, not a section.")
        at = at.setdefault(folder, {})
        if not isinstance(at, dict | list):
            raise InputError(f"--set {setting!r}: {folder!r} is a value, not a section.")
    if not isinstance(at, dict | list):
        raise InputError(f"--set {setting!r}: {folders[-1]!r} is a value, not a section.")
    if isinstance(at, list):
        raise InputError(f"--set {setting!r}: say which entry, for example {folders[0]}.0.{last}.")
    at[last] = value


def _entry(entries: list[Any], index: str, key: str) -> Any:  # noqa: ANN401 - TOML is anything
    if not index.isdigit() or int(index) >= len(entries):
        raise InputError(f"--set {key}: there is no entry {index!r}; count from 0 to {len(entries) - 1}.")
    return entries[int(index)]


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from plain values.

    Args:
        cls: the dataclass; its fields may be dataclasses too.
        values: the value of each field that is not to have its default.
        where: the path to these values, for errors.

    Raises:
        UnknownNameError: for a key that is not a field.
        InputError: for a value of another type.
    """
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise unknown(f"key in {where}", key, known)
    return cls(**{key: _converted(value, hints[key], f"{where}.{key}") for key, value in values.items()})


def _converted(value: Any, hint: Any, where: str) -> Any:  # noqa: ANN401 - by nature
    origin = get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return build(hint, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_converted(v, get_args(hint)[0], where) for v in value)
    if origin in (Union, types.UnionType):
        (hint,) = (a for a in get_args(hint) if a is not types.NoneType)
        return None if value is None else _converted(value, hint, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise unknown(f"value of {where}", str(value), [str(a) for a in get_args(hint)])
        return value
    if hint is float and (value in ("inf", "-inf") or (isinstance(value, int) and not isinstance(value, bool))):
        return float(value)
    if isinstance(value, float) and math.isnan(value):
        raise InputError(f"{where} is not a number: correct the recipe.")
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        name = getattr(hint, "__name__", str(hint))
        raise InputError(f"{where} is {value!r}, but must be of type {name}: correct the recipe.")
    return value
