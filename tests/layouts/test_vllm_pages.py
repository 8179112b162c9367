"""Pages of a real vLLM, read through the catalogue's descriptors. See tests/data/vllm_pages/README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pdhandoff.layouts import Component, RopeOrder, catalogue
from support.strided import PageFile, decode_part, decode_plane, load_pages, row_bytes

DATA = Path(__file__).parents[1] / "data" / "vllm_pages"
FILES = {path.stem: load_pages(path) for path in sorted(DATA.glob("*.safetensors"))}
FP8, BF16, GLM, TOK9 = (FILES[name] for name in ("v32_fp8_C333", "v32_bf16_C333", "glm_fp8_C333", "v32_fp8_C333_tok9"))
CHUNKS = {256: FILES["v32_fp8_A256"], 512: FILES["v32_fp8_A512"], 700: FILES["v32_fp8_A700"]}
PREFIX = FILES["v32_fp8_B560"]

LAYERS = (0, 1, 2, 3)
MTP = 3
ROWS = catalogue.fp8_ds_mla_rows(layers=LAYERS)
PLAIN = catalogue.mla_rows(layers=LAYERS)
KEYS = catalogue.index_pages(layers=LAYERS, rope_order=RopeOrder.HALF_SPLIT)
PROMPT = range(333)
TABLE = range(16)  # pages were saved in block-table order

Values = npt.NDArray[np.float32]


def tensor(file: PageFile, component: Component, layer: int) -> npt.NDArray[np.uint8]:
    name = "attn" if component.name == "mla_latent" else "indexer.k_cache"
    return file.tensors[f"model.layers.{layer}.self_attn.{name}"]


def part(file: PageFile, component: Component, layer: int, name: str, tokens: range = PROMPT) -> Values:
    return decode_part(component, name, tensor(file, component, layer), TABLE, tokens)[:, 0]


def plane(file: PageFile, component: Component, layer: int, name: str, tokens: range = PROMPT) -> Values:
    return decode_plane(component, component.plane(name), tensor(file, component, layer), TABLE, tokens)[:, 0]


def stored(file: PageFile, component: Component, layer: int, tokens: range) -> npt.NDArray[np.uint8]:
    return row_bytes(component, tensor(file, component, layer), TABLE, tokens)


def changed_rows(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> list[int]:
    return np.flatnonzero((a != b).any(axis=1)).tolist()


def cosine(a: Values, b: Values) -> Values:
    return np.asarray((a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1)))


@pytest.mark.parametrize("name", FILES)
def test_pages_are_as_long_as_the_descriptors_say(name: str) -> None:
    for key, memory in FILES[name].tensors.items():
        latent = PLAIN if "bf16" in name else ROWS
        component = latent if key.endswith(".attn") else KEYS
        pages = FILES[name].shapes[key][0]
        assert memory.nbytes == pages * component.region_page_bytes("")
        assert pages * 64 >= int(FILES[name].metadata["end"])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("file", [FP8, GLM], ids=["v32", "glm"])
def test_latent_scales_are_the_largest_magnitude_over_448(file: PageFile, layer: int) -> None:
    codes = plane(file, ROWS, layer, "latent").reshape(333, 4, 128)
    scales = plane(file, ROWS, layer, "latent.scale")
    assert (np.abs(codes).max(-1) == 448).all()
    assert (np.log2(scales) % 1 == 0).mean() < 0.05  # not powers of two


@pytest.mark.parametrize("layer", LAYERS)
def test_scales_follow_from_the_same_rows_in_bf16(layer: int) -> None:
    largest = np.abs(part(BF16, PLAIN, layer, "latent").reshape(333, 4, 128)).max(-1)
    assert (plane(FP8, ROWS, layer, "latent.scale") == largest / np.float32(448)).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_fp8_rows_decode_to_the_bf16_rows(layer: int) -> None:
    assert cosine(part(FP8, ROWS, layer, "latent"), part(BF16, PLAIN, layer, "latent")).min() > 0.999
    assert (part(FP8, ROWS, layer, "rope") == part(BF16, PLAIN, layer, "rope")).all()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("file", [FP8, BF16, GLM], ids=["v32", "v32 bf16", "glm"])
def test_index_scales_are_powers_of_two(file: PageFile, layer: int) -> None:
    scales = plane(file, KEYS, layer, "index_key.scale")
    assert (np.log2(scales) % 1 == 0).all()
    largest = np.abs(plane(file, KEYS, layer, "index_key")).max(-1)
    assert ((largest >= 224) & (largest <= 448)).all()


def same_tokens(file: PageFile) -> npt.NDArray[np.int64]:
    """Positions of the same token at two places: in layer 0 their latents, which know no position, are equal."""
    seen: dict[bytes, int] = {}
    pairs = []
    for position, row in enumerate(part(file, ROWS, 0, "latent")):
        key = row.tobytes()
        if key in seen:
            pairs.append((seen[key], position))
        seen[key] = position
    return np.array(pairs)


def pair_norms(values: Values, order: RopeOrder) -> Values:
    """The length of each rotary pair: a rotation by position leaves it as it is, if the pairs are the right ones."""
    rotary = values[:, :64]
    if order is RopeOrder.INTERLEAVED:
        return np.hypot(rotary[:, 0::2], rotary[:, 1::2])
    return np.hypot(rotary[:, :32], rotary[:, 32:])


@pytest.mark.parametrize(
    ("file", "component", "name", "order"),
    [
        (FP8, ROWS, "rope", RopeOrder.INTERLEAVED),
        (GLM, ROWS, "rope", RopeOrder.INTERLEAVED),
        (FP8, KEYS, "index_key", RopeOrder.HALF_SPLIT),
        (GLM, KEYS, "index_key", RopeOrder.INTERLEAVED),
    ],
    ids=["v32 rope", "glm rope", "v32 index key", "glm index key"],
)
def test_rotary_pairs_are_where_the_descriptor_says(
    file: PageFile, component: Component, name: str, order: RopeOrder
) -> None:
    pairs = same_tokens(file)
    assert len(pairs) > 30
    values = part(file, component, 0, name)

    def drift(candidate: RopeOrder) -> float:
        norms = pair_norms(values, candidate)
        return float(np.abs(norms[pairs[:, 0]] - norms[pairs[:, 1]]).mean() / norms.mean())

    other = {RopeOrder.INTERLEAVED: RopeOrder.HALF_SPLIT, RopeOrder.HALF_SPLIT: RopeOrder.INTERLEAVED}[order]
    assert drift(order) < 0.03
    assert drift(other) > 0.2


@pytest.mark.parametrize("file", [FP8, GLM], ids=["v32", "glm"])
def test_index_keys_are_not_rotated_by_hadamard(file: PageFile) -> None:
    # a rotation would mix the rotary half, which knows the position, into the other
    pairs = same_tokens(file)
    rest = part(file, KEYS, 0, "index_key")[:, 64:]
    assert (rest[pairs[:, 0]] == rest[pairs[:, 1]]).all()


def test_the_two_models_hold_other_state() -> None:
    assert cosine(part(FP8, ROWS, 0, "rope"), part(GLM, ROWS, 0, "rope")).max() < 0.99
    assert len(changed_rows(stored(FP8, KEYS, 0, PROMPT), stored(GLM, KEYS, 0, PROMPT))) > 300


@pytest.mark.parametrize("component", [ROWS, KEYS], ids=["latent", "index"])
def test_the_first_sampled_token_is_in_the_last_draft_row_only(component: Component) -> None:
    for layer in LAYERS:
        rows = changed_rows(stored(FP8, component, layer, PROMPT), stored(TOK9, component, layer, PROMPT))
        assert rows == ([332] if layer == MTP else [])


@pytest.mark.parametrize("component", [ROWS, KEYS], ids=["latent", "index"])
@pytest.mark.parametrize("layer", [0, 1, MTP])
def test_a_later_chunk_rewrites_no_earlier_row(component: Component, layer: int) -> None:
    # that includes the draft rows 255 and 511, which this runner built from the prompt's last token
    for end, later in ((256, 512), (512, 700)):
        before, after = (stored(CHUNKS[chunk], component, layer, range(end)) for chunk in (end, later))
        assert changed_rows(before, after) == []
        # the look-ahead page exists and is empty: the token count, not the page count, says what is valid
        assert not stored(CHUNKS[end], component, layer, range(end, end + 64)).any()
        assert stored(CHUNKS[later], component, layer, range(end, end + 64)).any(axis=1).all()


@pytest.mark.parametrize("component", [ROWS, KEYS], ids=["latent", "index"])
@pytest.mark.parametrize("layer", [0, 1, MTP])
def test_a_prefix_hit_shares_its_rows(component: Component, layer: int) -> None:
    assert int(PREFIX.metadata["before"]) == 384
    ours, theirs = (stored(file, component, layer, range(560)) for file in (PREFIX, CHUNKS[700]))
    assert changed_rows(ours[:384], theirs[:384]) == []
    # 450 tokens are shared; a draft row also knows the token after it
    assert changed_rows(ours, theirs)[0] == (449 if layer == MTP else 450)
