# SPDX-License-Identifier: Apache-2.0
"""A study as a file: settings, targets, seeds and methods in order of priority, expanded into units.

A unit is one Original (setting, seed), one Retrain (setting, target, seed), one run of a method (setting, seed, target,
method) or one control (Natural beside the methods of a target). Units are ordered by Original, so that all work on one
Original is done together and its weights need not be kept; Originals come in the order of the blocks that first need
them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedquit.core.method import Method
from fedquit.errors import InputError
from fedquit.inference.gaps import Margin
from fedquit.results.comparison import Target, members
from fedquit.results.study_folder import PlannedUnit, StudyFolder
from fedquit.running.recipe import Options, Recipe, build, changed, load
from fedquit.studies.comparison import parse_targets
from fedquit.utils.names import lookup, unknown

Section = Mapping[str, Any]  # the section [method] of a recipe
Seeds = tuple[int, ...]
NONE_GIVEN: Mapping[str, Recipe] = MappingProxyType({})


@dataclass(frozen=True)
class MethodEntry:
    """A method of a block: `[[block.method]]`.

    Attributes:
        name: As in a recipe.
        preset: Another reading of the method.
        options: Its fields.
        knob: The field whose strengths are tried; else the method's first knob.
        strengths: How many values of the knob, over its range (`Method.knobs`).
        values: The values of the knob, in place of `strengths`.
        targets: The targets of the block that it runs for; else all.
        apart: Whether it watches an Original of its own: a history that is too large to be kept for long.
    """

    name: str
    preset: str = ""
    options: Options = field(default_factory=dict)
    knob: str = ""
    strengths: int = 0
    values: tuple[float, ...] = ()
    targets: tuple[str, ...] = ()
    apart: bool = False


@dataclass(frozen=True)
class Block:
    """Targets, seeds and methods on one setting: `[[block]]`.

    Attributes:
        recipe: The setting: a packaged recipe, or a .toml file beside the study's.
        name: Of the setting in folders and tables; else the recipe's.
        set: Changes of the recipe's keys, as `--set` takes them.
        partition_file: Who gets which examples; looked for in `--partition-dir`, else beside the study.
        targets: Clients that leave in turn; "0+1" for clients that leave together; "all".
        seeds: Of Original: for all targets, or a list for each.
        retrain_seeds: Of Retrain, likewise; the first is the run's reference. Without any, Retrain has the run's seed.
        methods: Names, with a preset as "mode/swapped".
        method: Methods with options or strengths.
        follow: Rounds that are recorded after each recovery.
        control: Whether Natural runs beside the methods.
    """

    recipe: str
    name: str = ""
    set: tuple[str, ...] = ()
    partition_file: str = ""
    targets: tuple[str, ...] = ("0",)
    seeds: tuple[Seeds, ...] = ((0,),)
    retrain_seeds: tuple[Seeds, ...] = ()
    methods: tuple[str, ...] = ()
    method: tuple[MethodEntry, ...] = ()
    follow: int = 0
    control: bool = False


@dataclass(frozen=True)
class StudyFile:
    """A study as it is written.

    Attributes:
        title: Of tables.
        margin: Of the equivalence with Retrain, fixed before the runs: "2" points, or "2s" deviations of Retrain.
        block: In order of priority.
    """

    title: str = ""
    margin: str = ""
    block: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A method with all its options, as a setting runs it.

    Attributes:
        label: Its name in tables.
        section: The section [method] of the recipe.
        entry: Where it was named.
        method: The method itself.
    """

    label: str
    section: Section
    entry: MethodEntry
    method: Method

    @property
    def folder(self) -> str:
        """Its name as a folder."""
        return re.sub(r"[^\w.+=-]+", "-", self.label.replace(":", "."))


@dataclass(frozen=True)
class Unit:
    """A unit with all that carrying it out needs.

    Attributes:
        planned: What its records say of it.
        recipe: That it carries out.
        original: The name of the Original that it builds on; "" for Original and Retrain themselves.
        retrain: The name of the Retrain that it is compared with; "" where there is none.
        attached: The sections [method] of the methods that watch Original, by name.
        targets: Of Original, the targets that it is judged on.
    """

    planned: PlannedUnit
    recipe: Recipe
    original: str = ""
    retrain: str = ""
    attached: Mapping[str, Section] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        """Its folder below `units`."""
        return self.planned.name


@dataclass(frozen=True)
class Plan:
    """A study, expanded.

    Attributes:
        title: Of tables.
        margin: Of the equivalence with Retrain.
        recipes: Of each setting, by name.
        units: In the order in which they are run; each comes after those that it waits for.
    """

    title: str
    margin: str
    recipes: Mapping[str, Recipe]
    units: tuple[Unit, ...]

    def folder(self, out: Path) -> StudyFolder:
        """The study in a folder."""
        recipes = {name: recipe.to_dict() for name, recipe in self.recipes.items()}
        return StudyFolder(out, self.title, tuple(unit.planned for unit in self.units), recipes, self.margin)


# Reading


def packaged_studies() -> list[str]:
    """The names of the studies that come with the package."""
    files = (resources.files("fedquit") / "study_files").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_study(where: str) -> StudyFile:
    """Read a study.

    Args:
        where: A file that ends in .toml, or the name of a study that comes with the package.

    Raises:
        InputError: It cannot be read, or holds values that cannot be used.
        UnknownNameError: A key, or the study itself, does not exist.
    """
    path = Path(where)
    if where in packaged_studies():
        text = (resources.files("fedquit") / "study_files" / f"{where}.toml").read_text(encoding="utf-8")
    elif path.suffix != ".toml":
        raise unknown("study", where, packaged_studies())
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the study {path} ({error}): check the path.") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the study {path} is not valid TOML: {error}.") from error
    return read_study(content)


def read_study(content: Mapping[str, Any]) -> StudyFile:
    """Build a study from the values of its file."""
    blocks = content.get("block", [])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise InputError("the blocks of a study are tables: write [[block]] before each.")
    study = build(StudyFile, {**content, "block": [_plain(block) for block in blocks]}, "study")
    if not study.block:
        raise InputError("the study has no [[block]]: write one, with a recipe, targets and methods.")
    if study.margin:
        Margin.parse(study.margin)
    return study


def _plain(block: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a block, with targets as words and seeds as one list for each target, or one for all."""
    values = dict(block)
    if "targets" in values:
        values["targets"] = _words(values["targets"])
    for key in ("seeds", "retrain_seeds"):
        given = values.get(key)
        if isinstance(given, list) and given and not any(isinstance(one, list) for one in given):
            values[key] = [given]
    entries = values.get("method", [])
    if isinstance(entries, list):
        entries = [dict(entry) if isinstance(entry, dict) else entry for entry in entries]
        for entry in entries:
            if isinstance(entry, dict) and "targets" in entry:
                entry["targets"] = _words(entry["targets"])
        values["method"] = entries
    return values


def _words(targets: object) -> object:
    listed = targets if isinstance(targets, list) else [targets]
    return [str(target) if isinstance(target, int) and not isinstance(target, bool) else target for target in listed]


# Expanding


def expand(
    study: StudyFile,
    *,
    folder: Path = Path(),
    data_dir: Path | None = None,
    partitions: Path | None = None,
    recipes: Mapping[str, Recipe] = NONE_GIVEN,
) -> Plan:
    """Expand a study into its units.

    Args:
        study: As it is written.
        folder: The folder of the study, where recipes and partition files may lie.
        data_dir: Where published data lies; else as recipes say.
        partitions: Where partition files lie; else beside the study.
        recipes: Those that a program gives as objects, by the name under which blocks speak of them.

    Raises:
        InputError: A block cannot be carried out, or two of one name differ.
    """
    settings: dict[str, Recipe] = {}
    chosen: list[tuple[Block, str, list[Variant]]] = []
    for block in study.block:
        recipe = _setting(block, folder, data_dir, partitions or folder, recipes)
        name = block.name or block.recipe.removesuffix(".toml").rpartition("/")[2]
        if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
            raise InputError(f"{name!r} is no name of a setting: take letters, digits, dots and dashes.")
        if settings.setdefault(name, recipe) != recipe:
            raise InputError(f"two blocks of the study are called {name!r} and differ: give one of them another name.")
        chosen.append((block, name, _variants(block, recipe)))
    expansion = _Expansion(settings, chosen)
    return Plan(study.title, study.margin, settings, tuple(expansion.units()))


def _setting(
    block: Block, folder: Path, data_dir: Path | None, partitions: Path, recipes: Mapping[str, Recipe]
) -> Recipe:
    where = str(folder / block.recipe) if block.recipe.endswith(".toml") else block.recipe
    recipe = changed(recipes[where], block.set) if where in recipes else load(where, block.set)
    if [event.kind for event in recipe.request] != ["forget"]:
        raise InputError(f"a study is over single requests to forget, and {block.recipe} has other events: change it.")
    if recipe.retrain_seed is not None:
        raise InputError(
            f"the seeds of Retrain are retrain_seeds in a study: leave retrain_seed out of {block.recipe}."
        )
    if block.control and recipe.recover.control:
        raise InputError(f"{block.recipe} runs Natural beside each method: leave control out of the block, or of it.")
    data = recipe.data
    if data_dir is not None:
        data = dataclasses.replace(data, folder=str(data_dir))
    if block.partition_file:
        data = dataclasses.replace(data, partition="file", partition_file=str(partitions / block.partition_file))
    recover = dataclasses.replace(recipe.recover, follow=block.follow or recipe.recover.follow)
    return dataclasses.replace(recipe, data=data, recover=recover)


def _variants(block: Block, recipe: Recipe) -> list[Variant]:
    """The methods of a block with each of their strengths; each once."""
    named = []
    for text in block.methods:
        name, _, preset = text.partition("/")
        named.append(MethodEntry(name, preset))
    variants: dict[str, Variant] = {}
    for entry in (*named, *block.method):
        for variant in _strengths(entry, recipe):
            variants.setdefault(variant.label, variant)
    return list(variants.values())


def _strengths(entry: MethodEntry, recipe: Recipe) -> Iterator[Variant]:
    own = recipe.method if entry.name == recipe.method_name else {}
    preset = {"preset": entry.preset} if entry.preset else {}
    section: dict[str, Any] = {**own, "name": entry.name, **preset, **entry.options}
    method = _method(section)
    words = f"{entry.name}/{entry.preset}" if entry.preset else entry.name
    options = [f"{key}={_short(value)}" for key, value in entry.options.items()]
    if not (entry.strengths or entry.values or entry.knob):
        yield Variant(" ".join([words, *options]), section, entry, method)
        return
    knobs = {knob.field: knob for knob in method.knobs}
    if not knobs:
        raise InputError(f"{entry.name} has no strength to try: leave strengths, values and knob out.")
    knob = lookup(knobs, entry.knob or next(iter(knobs)), f"knob of {entry.name}")
    if bool(entry.values) == bool(entry.strengths):
        raise InputError(
            f"the strengths of {entry.name}: give values = [...], or strengths = 4 for so many of its range."
        )
    for value in entry.values or knob.values(entry.strengths):
        exact = int(value) if isinstance(knob.low, int) else float(value)
        swept = {**section, knob.field: exact}
        yield Variant(" ".join([words, *options, f"{knob.field}={_short(exact)}"]), swept, entry, _method(swept))


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _method(section: Section) -> Method:
    return Recipe(method=section).build_method()


def watching(section: Section) -> Section:
    """The part of a method's section that its hooks into training read: strengths of one method share an Original."""
    method = _method(section)
    if method.training_fields is None:
        return section
    return {"name": section["name"], **{name: getattr(method, name) for name in method.training_fields}}


@dataclass(frozen=True)
class _Place:
    """A target and seed of a block, with the Retrains that belong to it."""

    setting: str
    target: Target
    seed: int
    retrain_seeds: Seeds = ()


class _Expansion:
    """Collects the units of each Original, then lists them Original by Original."""

    def __init__(self, settings: Mapping[str, Recipe], chosen: Sequence[tuple[Block, str, list[Variant]]]) -> None:
        self._settings = settings
        self._originals: dict[str, Unit] = {}  # by what determines them
        self._work: dict[str, dict[str, Unit]] = {}  # by name of the Original, its units by name
        self._retrains: dict[str, Unit] = {}  # by what determines them
        self._needed: dict[str, list[Unit]] = {}  # by name of a run, the Retrains that it is judged by
        self._controls: dict[str, dict[_Place, list[str]]] = {}  # by name of the Original and place, the runs beside it
        self._trained = {name: _trained(recipe) for name, recipe in settings.items()}
        self._attached = self._attached_by_group(chosen)
        for block, setting, variants in chosen:
            for place in _places(block, setting, settings[setting]):
                self._add(block, place, variants)

    def units(self) -> Iterator[Unit]:
        begun: set[str] = set()  # Retrains that an earlier run had need of
        for original in self._originals.values():
            yield original
            for unit in self._work[original.name].values():
                for retrain in self._needed[unit.name]:
                    if retrain.name not in begun:
                        begun.add(retrain.name)
                        yield retrain
                yield unit
            for place, beside in self._controls.get(original.name, {}).items():
                yield self._control(place, original, beside)

    def _attached_by_group(
        self, chosen: Sequence[tuple[Block, str, list[Variant]]]
    ) -> dict[tuple[str, str], dict[str, Section]]:
        """By training and group, the methods that watch Original: "" is the group of all that can share one."""
        attached: dict[tuple[str, str], dict[str, Section]] = {}
        for _, setting, variants in chosen:
            trained = self._trained[setting]
            shared = attached.setdefault((trained, ""), {})
            for variant in variants:
                if not variant.method.shapes_training:
                    continue
                name = str(variant.section["name"])
                section = watching(variant.section)
                alone = variant.entry.apart or variant.method.knows_request
                if alone or shared.get(name, section) != section:
                    attached[trained, variant.label] = {name: section}
                else:
                    shared[name] = section
        return attached

    def _add(self, block: Block, place: _Place, variants: Sequence[Variant]) -> None:
        recipe = self._settings[place.setting]
        for variant in variants:
            only = variant.entry.targets
            if only and place.target not in _targets(only, recipe):
                continue
            group = variant.label if (self._trained[place.setting], variant.label) in self._attached else ""
            original = self._original(place, variant, group)
            work = self._work[original.name]
            retrains = self._retrains_of(place) if recipe.retrain else []
            unit = self._run(place, variant, original, retrains)
            self._needed[unit.name] = retrains
            if work.setdefault(unit.name, unit) != unit:
                raise InputError(
                    f"two blocks run {unit.name} with other seeds of Retrain: give one of them another name."
                )
            if block.control and not group:
                at = _Place(place.setting, place.target, place.seed)
                self._controls.setdefault(original.name, {}).setdefault(at, []).append(unit.name)

    def _original(self, place: _Place, variant: Variant, group: str) -> Unit:
        recipe = self._settings[place.setting]
        trained = self._trained[place.setting]
        attached = self._attached[trained, group]
        own = recipe.request[0].clients
        told = _knows(recipe, variant)  # its training depends on who will leave
        clients = members(place.target) if told else own
        key = json.dumps([trained, recipe.evaluate.attacks, place.seed, group, clients])
        if key not in self._originals:
            words = [f"seed-{place.seed}", *([variant.folder] if group else [])]
            words += ["+".join(map(str, clients))] if told else []
            unit = self._made(
                f"{place.setting}/original/{'-'.join(words)}",
                "original",
                place,
                _with(recipe, place.seed, clients),
                attached=attached,
            )
            self._originals[key] = unit
            self._work[unit.name] = {}
        known = self._originals[key]
        if place.target not in known.targets:
            known = dataclasses.replace(known, targets=(*known.targets, place.target))
            self._originals[key] = known
        return known

    def _retrains_of(self, place: _Place) -> list[Unit]:
        """The Retrains of a place, the run's reference first."""
        recipe = self._settings[place.setting]
        retrains = []
        for seed in place.retrain_seeds or (place.seed,):
            own = _with(recipe, seed, members(place.target))
            asked = [own.request[0].samples, own.request[0].choose, own.request[0].clients]
            key = json.dumps([self._trained[place.setting], dataclasses.asdict(recipe.evaluate), asked, seed])
            if key not in self._retrains:
                name = f"{place.setting}/retrain/{_clients(place.target)}/seed-{seed}"
                self._retrains[key] = self._made(name, "retrain", place, own, seed=seed)
            retrains.append(self._retrains[key])
        return retrains

    def _run(self, place: _Place, variant: Variant, original: Unit, retrains: Sequence[Unit]) -> Unit:
        recipe = self._settings[place.setting]
        own = _with(recipe, place.seed, members(place.target))
        reference = place.retrain_seeds[0] if place.retrain_seeds else None
        own = dataclasses.replace(own, method=dict(variant.section), retrain_seed=reference if retrains else None)
        names = [unit.name for unit in retrains]
        unit = self._made(f"{_folder(place)}/{variant.folder}", "method", place, own, original=original, retrains=names)
        planned = dataclasses.replace(
            unit.planned,
            method=variant.label,
            after=(original.name, *names[:1]),
            retrains=tuple(names) if place.retrain_seeds else (),
        )
        return dataclasses.replace(unit, planned=planned)

    def _control(self, place: _Place, original: Unit, beside: Sequence[str]) -> Unit:
        """Natural beside the methods on one Original; it comes after them, and is as long as the longest."""
        own = _with(self._settings[place.setting], place.seed, members(place.target))
        own = dataclasses.replace(own, method={"name": "natural"})
        unit = self._made(f"{_folder(place)}/control", "control", place, own, original=original)
        after = tuple(dict.fromkeys((original.name, *beside)))
        return dataclasses.replace(unit, planned=dataclasses.replace(unit.planned, after=after))

    def _made(
        self,
        name: str,
        kind: str,
        place: _Place,
        recipe: Recipe,
        *,
        seed: int | None = None,
        original: Unit | None = None,
        retrains: Sequence[str] = (),
        attached: Mapping[str, Section] | None = None,
    ) -> Unit:
        planned = PlannedUnit(
            name=name,
            kind=kind,
            setting=place.setting,
            seed=place.seed if seed is None else seed,
            target=() if kind == "original" else members(place.target),
            recipe_hash=recipe.hash,
        )
        return Unit(
            planned,
            recipe,
            original=original.name if original else "",
            retrain=retrains[0] if retrains else "",
            attached=attached if attached is not None else (original.attached if original else {}),
        )


def _places(block: Block, setting: str, recipe: Recipe) -> Iterator[_Place]:
    """The targets and seeds of a block, seed by seed: targets that share an Original come together."""
    targets = _targets(block.targets, recipe)
    seeds = _by_target(block.seeds, targets, "seeds")
    retrains = _by_target(block.retrain_seeds, targets, "retrain_seeds") if block.retrain_seeds else {}
    for target in targets:
        if set(seeds[target]) & set(retrains.get(target, ())):
            raise InputError(f"retrain_seeds share a seed with Original in {setting}: give Retrain seeds of its own.")
    for seed in dict.fromkeys(seed for target in targets for seed in seeds[target]):
        for target in targets:
            if seed in seeds[target]:
                yield _Place(setting, target, seed, retrains.get(target, ()))


def _targets(words: Sequence[str], recipe: Recipe) -> list[Target]:
    chosen = parse_targets(",".join(words)) if words else None
    targets = list(range(recipe.data.clients)) if chosen is None else chosen
    for target in targets:
        for client in members(target):
            if not 0 <= client < recipe.data.clients:
                raise InputError(f"there is no client {client} among {recipe.data.clients}: correct the targets.")
    return list(targets)


def _by_target(seeds: tuple[Seeds, ...], targets: Sequence[Target], key: str) -> dict[Target, Seeds]:
    """The seeds of each target: one list for all, or one for each."""
    if len(seeds) not in (1, len(targets)):
        raise InputError(f"{key} has {len(seeds)} lists for {len(targets)} targets: give one for all, or one for each.")
    lists = seeds * len(targets) if len(seeds) == 1 else seeds
    by_target = {target: tuple(dict.fromkeys(own)) for target, own in zip(targets, lists, strict=True)}
    if not all(by_target.values()):
        raise InputError(f"{key} has an empty list: give each target at least one seed.")
    return by_target


def _knows(recipe: Recipe, variant: Variant) -> bool:
    """Whether Original depends on who will leave: the method must know, or something is planted in their data."""
    return bool(variant.method.knows_request or recipe.evaluate.backdoor or recipe.audit.canaries)


def _trained(recipe: Recipe) -> str:
    """What settings have in common that share trainings."""
    plain = recipe.to_dict()
    planted = recipe.evaluate.backdoor or recipe.audit.canaries
    sections = ["data", "model", "train", "engine", *(["evaluate", "audit"] if planted else [])]
    return json.dumps([recipe.data.folder, *(plain[key] for key in sections)], sort_keys=True)


def _with(recipe: Recipe, seed: int, clients: Sequence[int]) -> Recipe:
    request = dataclasses.replace(recipe.request[0], clients=tuple(clients))
    return dataclasses.replace(recipe, seed=seed, request=(request,))


def _clients(target: Target) -> str:
    clients = members(target)
    return ("clients-" if len(clients) > 1 else "client-") + "+".join(map(str, clients))


def _folder(place: _Place) -> str:
    return f"{place.setting}/seed-{place.seed}/{_clients(place.target)}"
