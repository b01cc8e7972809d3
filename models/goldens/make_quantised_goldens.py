"""Makes tiny checkpoints in the quantised formats of Hugging Face's folders, with their logits.

    python make_quantised_goldens.py OUT_FOLDER

The weights are quantised and packed as the formats define it, and transformers computes the logits
in f32 of what the stored numbers stand for. compressed-tensors==0.20.0 packs its own format. The
packing of the others is that of their own programs, which need a GPU to run: GPTQ's of AutoGPTQ 0.7
(`auto_gptq/nn_modules/qlinear/qlinear_cuda.py`, `pack`), AWQ's of AutoAWQ 0.2
(`awq/modules/linear/gemm.py`, `from_linear`), FP8's of transformers
(`integrations/finegrained_fp8.py`).
"""

import json
import pathlib
import platform
import sys
import tempfile

import compressed_tensors
import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, VOCABULARY = 40, 48
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def spread(scales, shape, block):
    """One scale for each value of a matrix, from one for each block; the last blocks may be cut off."""
    rows, columns = (size or full for size, full in zip(block, shape))
    whole = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: shape[0], : shape[1]]


def largest(matrix, block):
    """The largest magnitude in each block."""
    rows, columns = (size or full for size, full in zip(block, matrix.shape))
    bands = matrix.abs().split(rows, 0)
    return torch.tensor([[part.max() for part in band.split(columns, 1)] for band in bands])


def floats(matrix, block, kind, scale_type):
    """Floats of eight bits, with a scale for each block."""
    scales = (largest(matrix, block) / torch.finfo(kind).max).to(scale_type)
    codes = (matrix / spread(scales.float(), matrix.shape, block)).to(kind)
    return codes, scales, codes.float() * spread(scales.float(), matrix.shape, block)


def integers(matrix, bits, group, symmetric, scale_type):
    """Codes from 0 on and zeros, with a scale for each group of columns, and the values."""
    groups = matrix.unflatten(1, (-1, group or matrix.shape[1]))
    top = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(2) / (top // 2)
        zeros = torch.full(scales.shape, top // 2 + 1)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round().int().clamp(1, top - 1)
    scales = scales.to(scale_type)
    wide = scales.float()[:, :, None]
    codes = ((groups / wide).round().int() + zeros[:, :, None]).clamp(0, top)
    values = (codes - zeros[:, :, None]) * wide
    return codes.flatten(1), zeros, scales, values.flatten(1)


def words(codes, bits, order=None):
    """Codes of each row in words of 32 bits, the first in the lowest bits."""
    codes = codes.long().unflatten(1, (-1, 32 // bits))
    if order:
        codes = codes[:, :, order]
    whole = (codes << (torch.arange(32 // bits) * bits)).sum(2)
    return (whole - (whole >> 31 << 32)).int().contiguous()


def fp8(
    block,
    kind=torch.float8_e4m3fn,
    scale_type=torch.float32,
    name="weight_scale_inv",
    more=(),
):
    def parts(matrix):
        codes, scales, values = floats(matrix, block, kind, scale_type)
        scales = scales[0, 0] if block == (None, None) else scales
        return {"weight": codes, name: scales} | {n: torch.tensor(1.0) for n in more}, values

    return parts


def compressed(bits, group, symmetric, packed=True):
    def parts(matrix):
        codes, zeros, scales, values = integers(matrix, bits, group, symmetric, torch.bfloat16)
        middle = 2 ** (bits - 1)
        signed, zeros = (codes - middle).to(torch.int8), (zeros - middle).to(torch.int8)
        found = {"weight_scale": scales}
        if packed:
            found["weight_packed"] = pack_to_int32(signed, bits)
            found["weight_shape"] = torch.tensor(matrix.shape)
        else:
            found["weight"] = signed
        if not symmetric:
            found["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
        return {name: part.contiguous() for name, part in found.items()}, values

    return parts


def gptq(bits, group, symmetric, version):
    def parts(matrix):
        codes, zeros, scales, values = integers(matrix, bits, group, symmetric, torch.float16)
        stored = zeros - 1 if version == 1 else zeros
        return {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(matrix.shape[1]) // (group or matrix.shape[1])).int(),
        }, values

    return parts


def awq(group):
    def parts(matrix):
        codes, zeros, scales, values = integers(matrix, 4, group, False, torch.float16)
        return {
            "qweight": words(codes.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }, values

    return parts


def group_of(form, kind, bits, strategy, symmetric, **more):
    weights = dict(
        num_bits=bits,
        type=kind,
        strategy=strategy,
        symmetric=symmetric,
        dynamic=False,
        observer="minmax",
        observer_kwargs={},
        actorder=None,
        block_structure=None,
        group_size=None,
    )
    return dict(
        quant_method="compressed-tensors",
        format=form,
        ignore=["lm_head"],
        kv_cache_scheme=None,
        quantization_status="compressed",
        config_groups=dict(
            group_0=dict(
                targets=["Linear"],
                weights=weights | more,
                input_activations=None,
                output_activations=None,
            )
        ),
    )


FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")
GPTQ = dict(quant_method="gptq", desc_act=False, true_sequential=True, damp_percent=0.1)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
# Name, family, settings beside the shape, config, the parts of a matrix, ends of the names of
# modules that stay as they are.
CASES = [
    (
        "fp8-blocks",
        "qwen3",
        dict(head_dim=16),
        FP8 | dict(weight_block_size=[24, 64], modules_to_not_convert=["lm_head", "o_proj"]),
        fp8((24, 64)),
        ["o_proj"],
    ),
    (
        "fp8-whole",
        "mistral",
        dict(sliding_window=None),
        FP8 | dict(activation_scheme="static", weight_block_size=None),
        fp8((None, None), scale_type=torch.bfloat16, more=["activation_scale"]),
        [],
    ),
    (
        "fp8-experts",
        "qwen3_moe",
        EXPERTS,
        FP8 | dict(weight_block_size=[128, 128], scale_fmt="ue8m0"),
        fp8((128, 128)),
        ["mlp.gate"],
    ),
    (
        "fp8-rows",
        "llama",
        {},
        group_of("float-quantized", "float", 8, "channel", True),
        fp8((1, None), scale_type=torch.bfloat16, name="weight_scale"),
        ["k_proj"],
    ),
    (
        "fp8-e5m2",
        "llama",
        {},
        FP8 | dict(fmt="e5m2", activation_scheme="static"),
        fp8((None, None), torch.float8_e5m2, name="weight_scale", more=["input_scale"]),
        [],
    ),
    (
        "int4-groups",
        "llama",
        {},
        group_of("pack-quantized", "int", 4, "group", True, group_size=32),
        compressed(4, 32, True),
        [],
    ),
    (
        "int4-zeros",
        "qwen2",
        {},
        group_of("pack-quantized", "int", 4, "group", False, group_size=32),
        compressed(4, 32, False),
        [],
    ),
    (
        "int8-fused",
        "phi3",
        {},
        group_of("pack-quantized", "int", 8, "channel", False),
        compressed(8, None, False),
        [],
    ),
    (
        "int8-rows",
        "llama",
        {},
        group_of("int-quantized", "int", 8, "channel", True),
        compressed(8, None, True, packed=False),
        [],
    ),
    (
        "gptq-int4",
        "llama",
        {},
        GPTQ | dict(bits=4, group_size=32, sym=False),
        gptq(4, 32, False, 1),
        [],
    ),
    (
        "gptq-int8",
        "qwen2",
        {},
        GPTQ | dict(bits=8, group_size=-1, sym=True, checkpoint_format="gptq_v2"),
        gptq(8, None, True, 2),
        [],
    ),
    (
        "awq-int4",
        "qwen2",
        {},
        dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        awq(32),
        [],
    ),
]


def weights_of(shapes):
    """Activations keep their size and attention is not flat; norms are around one."""
    found = {}
    for name, shape in shapes.items():
        uniform = torch.rand(shape) * 2 - 1
        if name.endswith("norm.weight"):
            found[name] = 1 + 0.2 * uniform
        elif name.endswith("_proj.weight"):
            found[name] = uniform * 2.5 / shape[1] ** 0.5
        else:
            found[name] = 0.5 * uniform
    return {name: values.bfloat16() for name, values in found.items()}


def case(name, kind, settings, quantised, parts_of, kept, folder):
    torch.manual_seed(len(name) * 31 + len(kind))
    config = AutoConfig.for_model(kind, **(SHAPE | settings))
    config.dtype = "bfloat16"
    empty = AutoModelForCausalLM.from_config(config)
    empty.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    tensors, values = {}, {}
    for tensor, own in weights_of({key: part.shape for key, part in stored.items()}).items():
        module = tensor.removesuffix(".weight")
        if not tensor.endswith("_proj.weight") or module.endswith(tuple(kept)):
            tensors[tensor], values[tensor] = own, own.float()
            continue
        parts, values[tensor] = parts_of(own.float())
        tensors |= {f"{module}.{part}": data for part, data in parts.items()}
    safetensors.torch.save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    tokens = [(n * 31 + 5 + n // 7) % VOCABULARY for n in range(TOKENS)]
    with torch.inference_mode():
        tensors["logits"] = model.float().eval()(torch.tensor([tokens])).logits[0].float()
    tensors = {f"{name}:{tensor}": data.contiguous() for tensor, data in tensors.items()}
    config = written | {"quantization_config": quantised}
    return tensors, {"name": name, "config": config, "tokens": tokens}


ROWS, COLUMNS = 3, 512


def block_values():
    """Random blocks in the form that memory has of each format, `scale, [zero,] codes`, and the values."""
    torch.manual_seed(7)
    found = {}
    for name, bits, columns in [
        *[(f"INT4_{columns}", 4, columns) for columns in (32, 64, 128)],
        *[(f"INT8_{columns}", 8, columns) for columns in (32, 128)],
    ]:
        count = ROWS * COLUMNS // columns
        codes = torch.randint(2**bits, (count, columns))
        zeros, scales = torch.randint(2**bits, (count, 1)), torch.randn(count, 1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        parts = [scales.view(torch.uint8), zeros.byte(), packed.byte()]
        found[name] = torch.cat(parts, 1), (codes - zeros) * scales
    for name, kind, columns in [
        ("F8_E4M3_32", torch.float8_e4m3fn, 32),
        ("F8_E4M3_128", torch.float8_e4m3fn, 128),
        ("F8_E5M2_32", torch.float8_e5m2, 32),
    ]:
        count = ROWS * COLUMNS // columns
        codes = torch.randint(256, (count, columns)).byte()
        codes = torch.where(codes.view(kind).float().isfinite(), codes, 0)
        scales = torch.randn(count, 1)
        values = codes.view(kind).float() * scales
        found[name] = torch.cat([scales.view(torch.uint8), codes], 1), values
    raw = {f"{name}.raw": raw.reshape(ROWS, -1).contiguous() for name, (raw, _) in found.items()}
    values = {f"{name}.values": value.reshape(ROWS, -1) for name, (_, value) in found.items()}
    return raw | values


def main(out):
    torch.use_deterministic_algorithms(True)
    tensors, cases = {}, []
    for settings in CASES:
        with tempfile.TemporaryDirectory() as folder:
            own, described = case(*settings, pathlib.Path(folder))
        tensors |= own
        cases.append(described)
    made_with = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compressed-tensors": compressed_tensors.__version__,
    }
    safetensors.torch.save_file(tensors, out / "quantised.safetensors")
    safetensors.torch.save_file(block_values(), out / "quantised_blocks.safetensors")
    lines = ",\n".join(json.dumps(described, separators=(",", ":")) for described in cases)
    (out / "quantised.json").write_text(
        f'{{"made_with":{json.dumps(made_with)},"cases":[\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
