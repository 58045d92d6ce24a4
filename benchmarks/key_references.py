# SPDX-License-Identifier: Apache-2.0
"""Give records that were made before there were keys the hashes by which a bundle is found.

    python benchmarks/key_references.py results/references/cifar100-lda0.1 settings/cifar100-lda \
        --data-dir DATA --partition-file cifar100_lda0.1_clients10.json

Only the field `key` is added; every other value stays as it is. The data, read with its published checksums, and the
partition are accepted if each client has as many examples of each class as the record says, and each set as many
scores; the recipe is the record's own, on the data and partition named here.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from fedquit.audit.evaluation import Set
from fedquit.errors import InputError
from fedquit.results.bundles import SettingKey, read_bundle, write_record
from fedquit.running.bundles import setting_key
from fedquit.running.recipe import Recipe, build, load
from fedquit.running.runner import evaluation_of
from fedquit.running.setup import Setup, build_setup
from fedquit.utils.files import read_json


def key_of(recipe: Recipe, stored: dict[str, object], setup: Setup) -> SettingKey:
    """The key of a record, whose recipe must agree with the setup in all that the key is made of."""
    for section in ("model", "train"):
        if getattr(recipe, section) != getattr(setup.recipe, section):
            raise InputError(f"the record was made with another [{section}]: name its own setting.")
    if recipe.data.name != setup.recipe.data.name or recipe.data.holdout != setup.recipe.data.holdout:
        raise InputError("the record was made on other data: name its own setting.")
    if stored["clients"] != setup.data.label_counts():
        raise InputError("the clients of the record have other examples: name its own data and partition file.")
    return setting_key(setup)


def require_sizes(sizes: dict[str, int], clients: tuple[int, ...], setup: Setup) -> None:
    """Refuse a partition whose sets have other sizes than the scores of a record."""
    if not clients:
        wanted = {"test": len(setup.data.dataset.test_y), "train": len(setup.data.y)}
    else:
        event = replace(setup.recipe.request[0], clients=clients)
        evaluation = evaluation_of(replace(setup, recipe=replace(setup.recipe, request=(event,))))
        names: tuple[Set, ...] = ("test", "forget", "holdout")
        wanted = {name: len(evaluation.labels(name)) for name in names if len(evaluation.labels(name))}
    if sizes != wanted:
        raise InputError(f"the record has scores of {sizes} examples and the partition {wanted}: name its own.")


def main() -> None:
    """Add keys to the records of a folder that have none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--partition-file", required=True)
    options = parser.parse_args()
    for reference in read_bundle(options.folder).references:
        stored = read_json(reference.file)
        computed = stored["computed"]
        settings = ["data.partition=file", f"data.partition_file={options.partition_file}"]
        settings += [f"data.folder={options.data_dir}", f"engine.precision={computed['precision']}"]
        setup = build_setup(load(options.recipe, settings))
        key = key_of(build(Recipe, stored["recipe"], "recipe"), stored, setup)
        require_sizes(dict(reference.sizes), reference.clients, setup)
        write_record(reference.file, stored | {"key": asdict(key)})
        print(f"{reference.file.name}: {key}")


if __name__ == "__main__":
    main()
