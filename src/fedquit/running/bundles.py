# SPDX-License-Identifier: Apache-2.0
"""Retrain from a reference bundle: which one fits a recipe, and what of it a run can use.

The hash by which a training lies in the cache has the bits of its first parameters in it, which differ between versions
of torch and between processors. The key of a bundle has not: it names data, partition, and how the training goes. Nor
has it the text of the layers, to which new versions of torch add arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedquit.audit.evaluation import Evaluation, Set
from fedquit.audit.half_precision import stored_scores
from fedquit.audit.scores import Scores
from fedquit.core import Params
from fedquit.core.params import fingerprint
from fedquit.data.federated import FederatedData
from fedquit.errors import InputError, StoreError
from fedquit.results.bundles import (
    LEFT_EMPTY,
    NO_WEIGHTS,
    Bundle,
    BundleReader,
    Reference,
    SettingKey,
    compared_original,
    retrain_from,
    said_of_empty,
)
from fedquit.running.recipe import Recipe, without_later_defaults
from fedquit.running.rows import Row
from fedquit.running.setup import Setup
from fedquit.running.training_cache import CACHE_SCHEMA
from fedquit.utils.names import source_of

IN_FULL = ("auc", "auc_low", "auc_high", "auc_p", "tail_p", "entropy_ks", "entropy_ks_p")  # recorded before rounding
BETWEEN = (  # the beginnings of the fields that need Retrain and Original
    *("leakage_", "auc_change", "original_auc"),
    *("holdout_verdict", "holdout_reason", "holdout_margin", "holdout_needed", "holdout_halves"),
)


def setting_key(setup: Setup) -> SettingKey:
    """The three hashes of a setting; see `SettingKey`."""
    data = setup.data
    dataset = data.dataset
    examples = {"x": dataset.x, "y": dataset.y, "test_x": dataset.test_x, "test_y": dataset.test_y}
    recipe = setup.recipe
    plain = recipe.to_dict()
    training = {
        "schema": CACHE_SCHEMA,
        "model": without_later_defaults(plain["model"], type(recipe.model), "model"),
        "layers": setup.model.layers(),
        "source": source_of(recipe.model.name),
        "train": without_later_defaults(plain["train"], type(recipe.train), "train"),
        "precision": setup.precision,
    }
    return SettingKey(
        data=_hash(fingerprint(examples) + repr(dataset.look)),
        partition=_partition_hash(data),
        training=_hash(json.dumps(training, sort_keys=True)),
    )


def _partition_hash(data: FederatedData) -> str:
    parts = {f"train {client}": at for client, at in data.train.items()}
    parts |= {f"holdout {client}": at for client, at in data.holdout.items() if len(at)}
    return _hash(fingerprint({**parts, "public": data.public}))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def samples_hash(evaluation: Evaluation) -> str:
    """A hash of the forgotten samples; "" where whole clients leave."""
    if not evaluation.request.samples:
        return ""
    return _hash(fingerprint({"forget": torch.cat(list(evaluation.data.forget.values()))}))


@dataclass(frozen=True)
class BundledRetrain:
    """The Retrain of a request that a run takes from a bundle.

    Attributes:
        reference: The Retrain with the run's own seed where there is one, else that with the lowest seed.
        others: All other Retrains of the same target.
        original: The bundle's Original with the run's seed, if it has one.
    """

    reference: Reference
    others: tuple[Reference, ...] = ()
    original: Reference | None = None

    @property
    def identity(self) -> str:
        """A text that is equal where the same Retrain is taken."""
        row = self.reference.rows[next(iter(self.reference.rows))][-1]
        return f"seed {self.reference.seed}, {row.get('fingerprint')}"

    def row(self, recipe: Recipe, number: int, evaluation: Evaluation, before: Params) -> Row:
        """Retrain's row for a run: as recorded, with what needs Original as well.

        Args:
            recipe: Of the run.
            number: Of the request.
            evaluation: Of the request.
            before: The model that the request found.

        Raises:
            StoreError: The scores of the bundle are not of as many examples as the request has.
        """
        clients = evaluation.request.clients
        recorded = self.reference.row(clients)
        computed = evaluation.of_stored(self._scores(evaluation), before)
        kept = {key: recorded[key] for key in IN_FULL if key in recorded}
        row = {**computed, **recorded, **_between(computed), **kept}
        row |= {"request": number, "clients": list(clients), "seed": recipe.seed}
        row["samples"] = evaluation.request.samples
        return row | {LEFT_EMPTY: said_of_empty(self.left_empty(recipe, recorded))}

    def own_row(self, recipe: Recipe) -> Row:
        """Retrain's row for itself, without what needs an Original.

        Args:
            recipe: Whose first request Retrain leaves out, and whose seed is Retrain's.
        """
        request = recipe.request[0]
        recorded = self.reference.row(request.clients)
        about = {"request": 0, "clients": list(request.clients), "seed": recipe.seed, "samples": request.samples > 0}
        return {**recorded, **about, LEFT_EMPTY: said_of_empty(self.left_empty(recipe, recorded))}

    def said(self, recipe: Recipe) -> dict[str, Any]:
        """The field `retrain_from` of the results of Retrain alone.

        Args:
            recipe: As for `own_row`.
        """
        recorded = self.reference.row(recipe.request[0].clients)
        return retrain_from(self.reference, self.left_empty(recipe, recorded), (), {})

    def provenance(self, recipe: Recipe, evaluation: Evaluation, row: Row, original: Row) -> dict[str, Any]:
        """The field `retrain_from` of the results.

        Args:
            recipe: Of the run.
            evaluation: Of the request.
            row: Retrain's, from `row`.
            original: Original's.
        """
        half = [key for key in ("leakage_auc", "auc_change", "holdout_verdict") if key in row]
        compared = compared_original(self.original, original)
        recorded = self.reference.row(evaluation.request.clients)
        return retrain_from(self.reference, self.left_empty(recipe, recorded), half, compared)

    def left_empty(self, recipe: Recipe, recorded: Mapping[str, Any]) -> dict[str, str]:
        """The fields of a run's rows that this Retrain cannot give, with the reason for each.

        Args:
            recipe: Of the run.
            recorded: Retrain's row in the bundle.
        """
        left = {"forget_js": NO_WEIGHTS["forget_js"]}
        if recipe.evaluate.relearn:
            left["relearn_ratio"] = NO_WEIGHTS["relearn_ratio"]
        for attack in recipe.evaluate.attacks:
            if f"mia_{attack}" not in recorded:
                left[f"mia_{attack}"] = "the attack was not recorded, and needs Retrain on retain data"
        if "retain_acc_last" not in recorded:
            left["retain_acc_last"] = NO_WEIGHTS["retain_acc_last"]
        return left

    def _scores(self, evaluation: Evaluation) -> dict[Set, Scores]:
        scores: dict[Set, Scores] = {}
        names: tuple[Set, ...] = ("test", "forget", "holdout")
        for name in names:
            if name not in self.reference.scores:
                continue
            labels = evaluation.labels(name)
            arrays = self.reference.scores[name]
            if len(labels) != len(arrays["phi"]):
                raise StoreError(
                    f"{self.reference.scores_file} has scores of {len(arrays['phi'])} {name} examples and the request "
                    f"has {len(labels)}: restore it from where the bundle came from."
                )
            scores[name] = stored_scores(arrays, labels, self.reference.positions)
        return scores

    def test_accuracy(self, evaluation: Evaluation) -> float:
        """Retrain's test accuracy in percent, from whole hits as a run counts them."""
        total = len(evaluation.data.dataset.test_y) * evaluation.positions
        recorded = float(self.reference.row(evaluation.request.clients)["test_acc"])
        return 100 * round(recorded * total / 100) / total


def _between(computed: Mapping[str, Any]) -> Row:
    """Those fields that need Retrain and Original."""
    return {key: value for key, value in computed.items() if key.startswith(BETWEEN)}


def retrain_in(
    bundle: Bundle, key: SettingKey, evaluation: Evaluation, seed: int, wanted: int | None = None
) -> BundledRetrain:
    """The Retrain of a request in a bundle.

    Args:
        bundle: Where to look.
        key: Of the setting.
        evaluation: Of the request.
        seed: Of the run.
        wanted: The seed of the Retrain that is taken where it is there; else the run's.

    Raises:
        InputError: None fits.
    """
    fitting = bundle.retrains(key, evaluation.request.clients, samples_hash(evaluation))
    first = seed if wanted is None else wanted
    chosen = next((ref for ref in fitting if ref.seed == first), fitting[0])
    others = tuple(ref for ref in fitting if ref is not chosen)
    return BundledRetrain(chosen, others, bundle.original(key, seed))


def recorded_retrain(bundles: BundleReader, setup: Setup, evaluation: Evaluation) -> Reference | None:
    """The Retrain of a request with the recipe's own seed, where a bundle has it by now.

    Args:
        bundles: Of one folder.
        setup: Of a recipe whose seed is Retrain's.
        evaluation: Of the recipe's request.
    """
    if bundles.empty:
        return None
    fitting = bundles.read().fitting(setting_key(setup), evaluation.request.clients, samples_hash(evaluation))
    return next((ref for ref in fitting if ref.seed == setup.recipe.seed), None)


def require_one_request(recipe: Recipe) -> None:
    """Refuse a recipe whose Retrain cannot come from a bundle.

    Raises:
        InputError: It has several events, canaries, a backdoor or local BatchNorm.
    """
    if [event.kind for event in recipe.request] != ["forget"]:
        raise InputError(
            "a bundle has Retrains of a first request to forget, and this recipe has other events: "
            "leave one [[request]] in it, or --retrain-from out."
        )
    if recipe.audit.canaries or recipe.evaluate.backdoor:
        raise InputError(
            "canaries and backdoors change the data of the clients that leave, so that no bundle fits: set "
            "audit.canaries = 0 and evaluate.backdoor = 0, or leave --retrain-from out."
        )
    if recipe.model.batchnorm == "local":
        raise InputError(
            "a bundle holds what one model says of all examples, and with local BatchNorm each client has its own: set "
            "model.batchnorm = 'averaged', or train Retrain without a bundle."
        )


def open_bundle(bundles: Path | BundleReader, recipe: Recipe) -> Bundle:
    """The bundle for a recipe that it can serve.

    Args:
        bundles: The folder of one bundle or of several, or what has read it before.
        recipe: Whose Retrain is to come from it.
    """
    require_one_request(recipe)
    reader = bundles if isinstance(bundles, BundleReader) else BundleReader(bundles)
    return reader.read()
