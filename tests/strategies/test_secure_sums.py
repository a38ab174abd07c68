"""Secure sums in whole runs: the same model with and without, whoever is lost on the way, and nothing seen of one."""

from __future__ import annotations

import pytest

from fedprune_app.engine import wire
from fedprune_app.engine.secure_aggregation import STAGE
from tests.conftest import wrapped_app
from tests.strategies.test_fedspallm import family, llm, run, settings, texts

__all__ = ["family", "llm", "run", "settings", "texts"]  # fixtures
OPTIONS = {"fedspallm_merge": "hessians"}


@pytest.fixture(scope="session", params=["llama"])
def family(request):  # noqa: F811 - one is enough
    return request.param


def losing(lost: dict[str, set[int]]):
    """The real app, whose clients in ``lost`` fail at a stage of the sum, as if their machines had gone."""

    def train(message, context, honest):
        stage = wire.fields_of(message.content).get(STAGE)
        if context.node_config["partition-id"] in lost.get(stage, ()):
            raise OSError("gone")
        return honest(message, context)

    return wrapped_app(train)


@pytest.mark.parametrize("layers_per_exchange", [1, 0])
def test_a_run_ends_with_the_same_model_with_secure_sums_and_without(run, layers_per_exchange):
    options = {**OPTIONS, "fedspallm_layers_per_exchange": layers_per_exchange}
    plain, secure = run(**options), run(**options, secure_sums=True)
    assert secure.sha256 == plain.sha256
    columns = ("replies", "failures", "perplexity_global", "density_global")
    assert [[row[name] for name in columns] for row in secure.rounds] == [
        [row[name] for name in columns] for row in plain.rounds
    ]
    assert [row["layers_pruned"] for row in secure.clients] == [row["layers_pruned"] for row in plain.clients]
