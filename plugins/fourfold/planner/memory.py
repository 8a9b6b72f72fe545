"""Memory of activations and of optimizer state, from the Hugging Face config alone. Imports no torch.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198) equations 1 and 2; Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054)
section 3 and table 1; Chen et al. 2016 (arXiv:1604.06174) and the lecture's count of recomputation. The exact counts were
derived from transformers 5.24 and torch 2.15 and are checked against saved_tensors_hooks in the tests.
"""

from dataclasses import dataclass
from typing import Any

from fourfold.activation.stretches import default_every_n, stretch_sizes
from fourfold.planner.parameters import head_dim, key_value_size, query_size
from fourfold.schema import Checkpointing, Precision


@dataclass(frozen=True)
class Activations:
    """Elements alive for backward, parameters excluded: all layers' `kept`, and one stretch's `recomputed` at a time."""

    kept: int
    recomputed: int

    @property
    def peak(self) -> int:
        """When backward has just recomputed the longest stretch; its own gradients not counted."""
        return self.kept + self.recomputed


@dataclass(frozen=True)
class Order:
    """Growth with the layers, in units of one layer's activations and one layer's forward."""

    memory: float
    compute: float


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, activations excluded."""

    weights: float
    gradients: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts a layer; the settings are those of TensorConfig."""

    size: int = 1  # t
    sequence_parallel: bool = True
    regather: bool = False

    def between(self, tokens: int) -> int:
        """Of `tokens`, those that one rank has between the blocks."""
        parts = self.size if self.sequence_parallel else 1
        assert tokens % parts == 0, (tokens, parts)
        return tokens // parts


WHOLE = Cut()


def layer_elements(config: Any, *, seq_len: int, attention: str = "sdpa", tokens: int = 1, cut: Cut = WHOLE) -> int:
    """Elements that one Llama layer saves for `tokens` tokens, on one rank, each storage once. Q = query channels, KV = key
    channels, A = heads, I = MLP, t = cut.size ranks.

    Each of the two norms: its input, 1/rms, the normalised values (2H + 1), of a rank's part of the tokens with sequence
    parallelism. The block's input (H): of all tokens, or of this rank's part with `regather`. Without sequence parallelism
    of all tokens on every rank, 6H + 2 for both.
    MLP: gate, silu(gate), up and their product (4I/t).
    Attention by `attention`, document mask included:
      sdpa                q, k, v repeated for grouped queries, out (4Q), log-sum-exp (A), the mask as numbers (S):
                          torch turns a boolean mask into one of the activations' dtype in every layer
      eager               q, k, v, out (4Q) and the probabilities (A S); in bf16 both as float32 and bf16 (2 A S)
      flash_attention_2   q, out (2Q), k and v as they are (2KV), log-sum-exp (A); derived only, needs a GPU to check
      fourfold            the same, 2Q/t + 2KV/t + A/t, at least one key head on each rank; at cp_size=1

    Korthikanti et al. 2022 section 4.2 count bytes of a 16-bit GPT layer in units of s b h, 34 = 4 norms + 11 attention +
    19 MLP. Theirs | ours in elements: norm inputs 4/t | 2 of 2H/t, and 2H + 2 more as transformers' RMSNorm is not one
    operation; inputs of the blocks 2 + 2, stored as parts (/t) as with `regather` | 2H; q, k 4/t | Q + KV; v 2/t | KV; input of
    the output projection 2/t | Q; GeLU's and the second product's inputs 8/t + 8/t | 4I of SwiGLU; dropout masks 1/t + 1/t |
    none; 5 a s / h of the scores | A, flash attention.
    """
    hidden, heads, query, keys = (
        config.hidden_size,
        config.num_attention_heads,
        query_size(config),
        key_value_size(config),
    )
    local_keys = max(keys // cut.size, head_dim(config))
    by_kind = {
        "sdpa": 4 * query + heads + seq_len,
        "eager": 4 * query + heads * seq_len,
        "flash_attention_2": 2 * query + 2 * keys + heads,
        "fourfold": (2 * query + heads) // cut.size + 2 * local_keys,
    }
    if attention not in by_kind:
        raise ValueError(f"attention={attention} is not one of {', '.join(by_kind)}")
    if cut.size > 1 and attention != "fourfold":
        raise ValueError(
            f"attention={attention} with tp_size={cut.size}: tensor parallelism computes attention=fourfold"
        )
    part = cut.between(tokens)
    inputs = 2 * hidden * (part if cut.regather and cut.sequence_parallel else tokens)
    inside = tokens * (by_kind[attention] + 4 * config.intermediate_size // cut.size)
    return part * 2 * (2 * hidden + 1) + inputs + inside


def activation_elements(
    config: Any,
    *,
    batch: int,
    seq_len: int,
    checkpointing: Checkpointing = Checkpointing.none,
    every_n: int | None = None,
    attention: str = "sdpa",
    cut: Cut = WHOLE,
) -> Activations:
    """Elements that the decoder layers of a Llama hold for one micro-batch of `batch` rows of `seq_len` tokens, on one tp rank.

    Without dropout; exact for float32, and for bf16 except with eager attention. Outside it: embedding, the rotary tables
    that all layers share, the last norm, the head.
    """
    mode = Checkpointing(checkpointing)
    tokens = batch * seq_len
    layer = layer_elements(config, seq_len=seq_len, attention=attention, tokens=tokens, cut=cut)
    if mode == Checkpointing.none:
        return Activations(kept=config.num_hidden_layers * layer, recomputed=0)
    kept = cut.between(tokens) * config.hidden_size
    if mode == Checkpointing.selective:
        kept += tokens * (query_size(config) + config.num_attention_heads) // cut.size
    sizes = stretch_sizes(config.num_hidden_layers, checkpointing=mode, every_n=every_n)
    return Activations(kept=len(sizes) * kept, recomputed=max(sizes) * layer - kept)


def layer_bytes(config: Any, *, batch: int, seq_len: int, flash: bool = False) -> float:
    """s b h (34 + 5 a s / h): Korthikanti et al. 2022 eq. 2, 16-bit GPT layer (4h MLP, dropout), no parallelism.

    Flash attention removes the second term.
    """
    scores = 0.0 if flash else 5 * config.num_attention_heads * seq_len / config.hidden_size
    return seq_len * batch * config.hidden_size * (34 + scores)


def order(num_layers: int, *, every_n: int | None) -> Order:
    """The lecture's count for N layers with a checkpoint every C: memory O(C), compute O(N^2 / C).

    every_n=1 is everything from the start each time: O(1), O(N^2); every_n=None is C = sqrt(N): O(sqrt N), O(N sqrt N);
    every_n=N keeps everything: O(N), O(N). It counts one stretch's memory, not the N / C kept inputs, and a recomputation
    from the last checkpoint for every layer; a framework keeps the recomputed stretch, so the real cost is one more forward.
    """
    stretch = default_every_n(num_layers) if every_n is None else every_n
    if not 1 <= stretch <= num_layers:
        raise ValueError(f"every_n={stretch} is not between 1 and the {num_layers} layers")
    return Order(memory=float(stretch), compute=num_layers**2 / stretch)


def zero_state_bytes(parameters: int, *, stage: int, shard_size: int, precision: Precision) -> StateBytes:
    """AdamW under ZeRO `stage`, sharded over `shard_size` ranks: bytes on one rank.

    bf16: weights 2, gradients 2, float32 master 4, moments 4 + 4 bytes a parameter (16); fp32: 4, 4, none, 4 + 4 (16).
    Stage 1 divides master and moments, 2 the gradients too, 3 the weights too. fp32_accumulation of gradients comes extra.
    """
    if stage not in (0, 1, 2, 3) or shard_size < 1:
        raise ValueError(f"zero.stage={stage} must be 0 to 3 and the shard group's size {shard_size} at least 1")
    wide = Precision(precision) == Precision.fp32
    state = shard_size if stage >= 1 else 1
    return StateBytes(
        weights=parameters * (4 if wide else 2) / (shard_size if stage >= 3 else 1),
        gradients=parameters * (4 if wide else 2) / (shard_size if stage >= 2 else 1),
        master=0.0 if wide else parameters * 4 / state,
        moments=parameters * 8 / state,
    )
