"""A real model, SmolLM2-135M-Instruct, on real documents: ZeRO-1 over context ranks and ZeRO-3 of replicated shards follow
one process's curve, and what comes out still speaks."""

from pathlib import Path

import pytest

from tests.parity.run_ranks import metrics, whole_run
from tests.pool import RankPool
from tools.make_smollm2 import make

pytestmark = pytest.mark.real
LAYOUTS = {
    "ring": (2, ["tier=zero1", "cp_size=2", "attention=ring"]),
    "hsdp": (4, ["tier=hsdp", "cluster.gpus_per_node=2"]),
}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return make(Path("~/.cache/fourfold/smollm2").expanduser())


def overrides(smollm2: Path, output: Path, *more: str) -> list[str]:
    return [
        "task=smollm2",
        f"model.path={smollm2}",
        f"cache_dir={smollm2.parent}",
        f"output_dir={output}",
        "data.max_documents=12",
        "data.eval_documents=0",
        "tracker=none",
        "precision=fp32",
        "seq_len=96",
        "global_batch_size=4",
        "max_steps=2",
        "optim.warmup_steps=0",
        "keep_last=1",
        "zero.reduce_bucket_size=30000000",
        *more,
    ]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("one")
    ranks.run(1, whole_run, overrides=overrides(smollm2, output, "tier=zero2", "export=false"))
    return output


def answer(folder: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer("The capital of France is", return_tensors="pt")
    return tokenizer.decode(model.generate(**tokens, max_new_tokens=4, do_sample=False)[0])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "hsdp")) for name in LAYOUTS])
def test_curve_of_one_process(ranks: RankPool, smollm2: Path, one_process: Path, tmp_path: Path, name: str) -> None:
    world, layout = LAYOUTS[name]
    ranks.run(world, whole_run, overrides=overrides(smollm2, tmp_path, *layout))
    for key in ("train/loss", "train/grad_norm"):
        assert metrics(tmp_path, key) == pytest.approx(metrics(one_process, key), rel=1e-4), key
    losses = list(metrics(tmp_path, "train/loss").values())
    assert 0.5 < losses[-1] < 4.0  # a random model has ln(49152) = 10.8
    if name == "hsdp":
        assert "Paris" in answer(tmp_path / "export")


def test_it_speaks_before_training(smollm2: Path) -> None:
    assert "Paris" in answer(smollm2)
