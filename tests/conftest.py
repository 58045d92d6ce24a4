# SPDX-License-Identifier: Apache-2.0
"""A toy world for every test: five ragged clients, images of 1x6x6, five classes, float64, always the same.

`toy_data` also has a holdout of four examples for each client and twelve public ones; `toy_start` are fresh parameters
of `toy_model`. All are shared by the whole run: nothing may change them in place.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import settings

from fedquit.core import Params
from fedquit.data.federated import Dataset, FederatedData
from fedquit.models import FunctionalModel, load_model

SIZES = (23, 8, 17, 30, 5)
HOLDOUT, PUBLIC, TEST, CLASSES = 4, 12, 40, 5

# The suite tries the same examples every time and minds no clock, so that a red run is the change's doing;
# `pytest --hypothesis-profile=search` looks further.
settings.register_profile("search", deadline=None)
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--by-file", action="store_true", help="end with the seconds that each test file took")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The seconds of the slowest test files, summed over all processes."""
    if not config.getoption("--by-file"):
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    slowest = sorted(seconds, key=lambda file: -seconds[file])
    for file in slowest[:20]:
        terminalreporter.write_line(f"{seconds[file]:8.1f}  {file}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.1f}  {len(seconds)} files")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test leaves to torch's own generator (a layer's first weights) is the same in every run of the suite."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def toy_model() -> FunctionalModel:
    return load_model("cnn", (1, 6, 6), CLASSES, dtype=torch.float64, width=4)


@pytest.fixture(scope="session")
def toy_start(toy_model: FunctionalModel) -> Params:
    return toy_model.init(seed=7)


@pytest.fixture(scope="session")
def toy_data() -> FederatedData:
    generator = torch.Generator().manual_seed(11)
    prototypes = torch.randn(CLASSES, 1, 6, 6, generator=generator, dtype=torch.float64)
    examples = sum(SIZES) + HOLDOUT * len(SIZES) + PUBLIC

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(CLASSES, (n,), generator=generator)
        return prototypes[y] + 0.8 * torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64), y

    (x, y), (test_x, test_y) = draw(examples), draw(TEST)
    # Positions are dealt from a shuffled deck, so that no test passes just because a client's are contiguous.
    deck = torch.randperm(examples, generator=generator)
    parts = [part.sort().values for part in torch.split(deck, [*SIZES, *[HOLDOUT] * len(SIZES), PUBLIC])]
    return FederatedData(
        Dataset(x, y, test_x, test_y, CLASSES),
        train=dict(enumerate(parts[: len(SIZES)])),
        holdout=dict(enumerate(parts[len(SIZES) : -1])),
        public=parts[-1],
    )
