"""The tree against a naive model (radix_model.py), in any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from radix_model_leaving import Model
from radix_model_tiers import LowerTiers


class FewGhosts(Model):
    max_ghosts = 3


class NoGhosts(Model):
    max_ghosts = 0


class WiderBlocks(Model):
    block_size = 3


class TwoTiers(Model):
    tiers = ("hbm", "ram")


class TwoTiersFewGhosts(Model):
    tiers = ("hbm", "ram")
    max_ghosts = 2


class LowerTiersFewGhosts(LowerTiers):
    max_ghosts = 2


class LowerTiersNoGhosts(LowerTiers):
    max_ghosts = 0


@pytest.mark.parametrize(
    "machine",
    [
        Model, FewGhosts, NoGhosts, WiderBlocks, TwoTiers, TwoTiersFewGhosts,
        LowerTiers, LowerTiersFewGhosts, LowerTiersNoGhosts,
    ],
)  # fmt: skip
def test_the_tree_equals_a_dictionary_of_all_prefixes(machine: type[Model]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
