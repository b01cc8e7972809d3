#!/usr/bin/env python3
"""Makes a model with random weights, and runs it with PyTorch and transformers.

    random_model.py make FOLDER [--tiny|--layers=N]
        writes config.json, seeded bf16 weights in the shape of Llama 3.1 8B, q4_k_m.gguf with other
        weights of that shape, fp8 with layers in floats of eight bits, and prompts.json
    random_model.py compare FOLDER FILE
        compares the output of `on_device check` with PyTorch's; exits with 1 when it is too far off
    random_model.py speed FOLDER
        measures decoded tokens a second at batch 1, compiled, with a static cache
    random_model.py paged FOLDER [--tiny]
        measures produced tokens a second of transformers' continuous batching
    random_model.py release FOLDER
        writes a small model with all files of a release; its tokens are bytes

Needs torch, transformers, tokenizers and safetensors; no network. Uses the first GPU where there is
one.
"""
import json
import os
import struct
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file

LARGE = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
TINY = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=515,
)
RELEASE = {**TINY, "hidden_size": 256, "head_dim": 64}
COMMON = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=1,
    eos_token_id=2,
    torch_dtype="bfloat16",
)
STD = 0.02
# The largest relative error of the vector of log-probabilities in f32. That in bf16 may be this
# many times the error of PyTorch in bf16; both are against PyTorch in f32.
F32_LIMIT, BF16_TIMES = 1e-4, 1.25
PROMPT_LENGTHS = [1, 7, 33, 128, 300, 511]
# Tokens that are decoded to measure the speed, and tokens in the cache before them.
DECODED, CONTEXT = 64, 1000
# Tokens of a prompt and of an answer, as in `on_device offline`, and the number of requests.
PAGED, PAGED_TINY = [(128, 128, 1024), (1000, 1000, 400)], [(8, 4, 3)]
# The types of GGUF files, by their numbers there, and the weights and bytes of a block.
GGUF_IDS = {"F32": 0, "Q4_K": 12, "Q6_K": 14}
GGUF_BLOCKS = {"F32": (1, 4), "Q4_K": (256, 144), "Q6_K": (256, 210)}
HEAD = "| work | measured | of the ceiling | target | predicted |\n|---|---|---|---|---|"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(folder, *flags):
    config = {**COMMON, **(TINY if "--tiny" in flags else LARGE)}
    for flag in flags:
        if flag.startswith("--layers="):
            config["num_hidden_layers"] = int(flag.removeprefix("--layers="))
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/config.json", "w") as out:
        json.dump(config, out, indent=2)
    groups = [outer(config)] + [layer(config, i) for i in range(config["num_hidden_layers"])]
    # Each group of weights is made on the device in turn and written to a file of its own.
    weight_map, total = {}, 0
    generator = torch.Generator(DEVICE).manual_seed(1)
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {key: weights(shape, generator) for key, shape in group.items()}
        save_file(tensors, f"{folder}/{name}", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    with open(f"{folder}/model.safetensors.index.json", "w") as out:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, out)
    if "--tiny" not in flags:
        write_gguf(f"{folder}/q4_k_m.gguf", config, generator)
        write_fp8(f"{folder}/fp8", config, weight_map, generator)
    with open(f"{folder}/prompts.json", "w") as out:
        json.dump([random_ids(config["vocab_size"], n, n) for n in PROMPT_LENGTHS], out)


def release(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ends = ["<|end|>", "<|user|>", "<|assistant|>"]
    known = ends + sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(known)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens(ends)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=ends[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    own = dict(vocab_size=len(known), bos_token_id=None, eos_token_id=0)
    config = {**COMMON, **RELEASE, **own, "max_position_embeddings": 4096, "rope_scaling": None}
    with open(f"{folder}/config.json", "w") as out:
        json.dump(config, out, indent=2)
    shapes = outer(config)
    for number in range(config["num_hidden_layers"]):
        shapes |= layer(config, number)
    generator = torch.Generator(DEVICE).manual_seed(1)
    tensors = {key: weights(shape, generator) for key, shape in shapes.items()}
    # The likeliest token is always a letter, so that answers are text.
    for number, text in enumerate(known):
        if not (text.isascii() and text.isalpha()):
            tensors["lm_head.weight"][number] = 0
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})


def write_fp8(folder, config, weight_map, generator):
    """Writes layers with matrices in E4M3, of which each row has a scale. What is in no layer is a
    link to the tensors in bf16."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/config.json", "w") as out:
        own = dict(quant_method="fp8", activation_scheme="dynamic")
        json.dump({**config, "quantization_config": own}, out, indent=2)
    found = {key: weight_map[key] for key in outer(config)}
    for name in set(found.values()):
        os.symlink(f"../{name}", f"{folder}/{name}")
    for i in range(config["num_hidden_layers"]):
        tensors = {}
        for key, shape in layer(config, i).items():
            tensors |= (
                e4m3(key, shape, generator) if len(shape) == 2 else {key: weights(shape, generator)}
            )
        save_file(tensors, f"{folder}/layer-{i}.safetensors", metadata={"format": "pt"})
        found |= dict.fromkeys(tensors, f"layer-{i}.safetensors")
    with open(f"{folder}/model.safetensors.index.json", "w") as out:
        json.dump({"metadata": {}, "weight_map": found}, out)


def e4m3(key, shape, generator):
    values = torch.randn(shape, generator=generator, device=generator.device) * STD
    scales = values.abs().amax(1, keepdim=True) / 448
    codes = (values / scales).to(torch.float8_e4m3fn)
    return {key: codes.cpu(), key.replace(".weight", ".weight_scale"): scales.cpu()}


def write_gguf(path, config, generator):
    """Writes a file whose weights are random blocks of the types that llama.cpp's mixture Q4_K_M
    gives them: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    tensors = gguf_tensors(config)
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(gguf_keys(config))))
    for key, value in gguf_keys(config).items():
        head += gguf_text(key) + gguf_value(value)
    at = 0
    for name, shape, kind in tensors:
        head += gguf_text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *reversed(shape), GGUF_IDS[kind], at)
        at += gguf_bytes(shape, kind)
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % 32))
        for _, shape, kind in tensors:
            out.write(gguf_blocks(shape, kind, generator).numpy().data)


def gguf_tensors(config):
    """Name, shape and type of each tensor."""
    layers = config["num_hidden_layers"]
    finer = [i < layers // 8 or i >= 7 * layers // 8 or i % 3 == 2 for i in range(layers)]
    names = dict(embed_tokens="token_embd", norm="output_norm", lm_head="output")
    names |= dict(q_proj="attn_q", k_proj="attn_k", v_proj="attn_v", o_proj="attn_output")
    names |= dict(gate_proj="ffn_gate", up_proj="ffn_up", down_proj="ffn_down")
    names |= dict(input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")

    def tensor(key, shape, prefix="", fine=False):
        own = names[key.split(".")[-2]]
        fine = own == "output" or (fine and own in ("attn_v", "ffn_down"))
        kind = "F32" if len(shape) == 1 else "Q6_K" if fine else "Q4_K"
        return f"{prefix}{own}.weight", shape, kind

    outer_ones = [tensor(key, shape) for key, shape in outer(config).items()]
    inner = [
        tensor(key, shape, f"blk.{i}.", finer[i])
        for i in range(layers)
        for key, shape in layer(config, i).items()
    ]
    return outer_ones + inner


def gguf_keys(config):
    sizes = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    # llama.cpp wants to know that there is no tokenizer.
    named = {"general.architecture": "llama", "tokenizer.ggml.model": "none"}
    return named | {f"llama.{key}": v for key, v in sizes.items()}


def gguf_text(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


def gguf_bytes(shape, kind):
    """Bytes of a tensor. Those of these types are multiples of the alignment of 32."""
    count, length = GGUF_BLOCKS[kind]
    return torch.Size(shape).numel() // count * length


def gguf_blocks(shape, kind, generator):
    if kind == "F32":
        return weights(shape, generator).float().view(torch.uint8)
    length = GGUF_BLOCKS[kind][1]
    count = gguf_bytes(shape, kind) // length
    made = torch.randint(
        256, (count, length), generator=generator, device=generator.device, dtype=torch.uint8
    )
    # The scales, and minimums that take the mean away, so that weights are about as large as STD.
    halves = {"Q4_K": {0: 1e-4, 2: 7.5e-4}, "Q6_K": {208: 1.5e-5}}[kind]
    for at, scale in halves.items():
        made[:, at : at + 2] = torch.tensor([scale]).half().view(torch.uint8).to(made.device)
    return made.cpu().flatten()


def random_ids(vocab_size, count, seed):
    return torch.randint(
        vocab_size, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def outer(config):
    table = (config["vocab_size"], config["hidden_size"])
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": table[1:],
        "lm_head.weight": table,
    }


def layer(config, number):
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def weights(shape, generator):
    """Norm weights are near one but not one, so that a model which forgets them is found."""
    values = torch.randn(shape, generator=generator, device=generator.device) * STD
    return (values + 1 if len(shape) == 1 else values).bfloat16().cpu()


def load(folder, kind):
    from transformers import AutoModelForCausalLM

    # Products in f32 must not be rounded to tf32.
    torch.set_float32_matmul_precision("highest")
    model = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="eager"
        )
        .to(DEVICE)
        .eval()
    )
    return model.float() if kind == "f32" else model


@torch.inference_mode()
def compare(folder, path):
    with open(path) as file:
        said = json.load(file)
    model, failed = load(folder, "bf16"), False
    runs = list(said["runs"].items())
    # What PyTorch itself says in this type.
    theirs = [torch.cat([against(model, e)[1] for e in entries]) for _, entries in runs]
    model = model.float()
    print("| run | relative error | largest error | same tokens |\n|---|---:|---:|---:|")
    for ways, tokens in said["same"].items():
        print(f"| {said['kind']}, {ways} | the same bits | | {tokens} of {tokens} |")
    for (run, entries), other in zip(runs, theirs):
        found, wanted, agree, steps = [], [], 0, 0
        for entry in entries:
            got, want, same = against(model, entry)
            found, wanted, agree, steps = (
                found + [got],
                wanted + [want],
                agree + same,
                steps + len(entry["tokens"]),
            )
        found, wanted = torch.cat(found), torch.cat(wanted)
        error, limit = relative(found, wanted), F32_LIMIT
        if said["kind"] == "bf16":
            limit = BF16_TIMES * relative(other, wanted)
        # NaN counts as too far off.
        failed |= not error <= limit
        print(
            f"| {said['kind']}, {run} | {error:.1e} of at most {limit:.1e} | {(found - wanted).abs().max():.1e} "
            f"| {agree} of {steps} |"
        )
    return failed


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def against(model, entry):
    """The given and the wanted log-probabilities of the ids of each step, and the number of tokens
    that are the most likely ones here too."""
    prompt, tokens = entry["prompt"], torch.tensor(entry["tokens"], device=DEVICE)
    ids = torch.tensor([prompt + entry["tokens"][:-1]], device=DEVICE)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
    likeliest = torch.tensor(entry["likeliest"], dtype=torch.float64, device=DEVICE)
    wanted = logits.log_softmax(-1).gather(1, likeliest[:, :, 0].long())
    return (
        likeliest[:, :, 1].flatten(),
        wanted.flatten(),
        (logits.argmax(-1) == tokens).sum().item(),
    )


@torch.inference_mode()
def speed(folder):
    from transformers import StaticCache

    model = load(folder, "bf16")
    model.set_attn_implementation("sdpa")
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 2 * DECODED + 8)
    position = torch.arange(CONTEXT, device=DEVICE)
    token = (
        model(
            (position % model.config.vocab_size)[None],
            past_key_values=cache,
            cache_position=position,
        )
        .logits[:, -1:]
        .argmax(-1)
    )
    # Graphs need a GPU; without one this only tests the loop.
    step = (
        torch.compile(model.forward, mode="reduce-overhead") if DEVICE == "cuda" else model.forward
    )
    print(HEAD)
    for name in ["warm-up", "timed"]:
        start = time.perf_counter()
        for _ in range(DECODED):
            position = position[-1:] + 1
            token = (
                step(token, past_key_values=cache, cache_position=position)
                .logits[:, -1:]
                .argmax(-1)
                .clone()
            )
        token.item()
        seconds = time.perf_counter() - start
        print(
            f"| transformers compiled, 1 row after {CONTEXT} tokens, {name} | {DECODED / seconds:.1f} tok/s | | | |",
            flush=True,
        )


def paged(folder, *flags):
    """Uses the first kind of attention that this version can run; it may choose a better one itself."""
    model = load(folder, "bf16")
    for attention in ["sdpa", "paged|sdpa", "paged|eager"]:
        try:
            model.set_attn_implementation(attention)
            # Graphs are recorded and kernels chosen before the timed runs.
            batched(model, *PAGED_TINY[0])
            break
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    else:
        sys.exit(f"no continuous batching here: {why}")
    print(HEAD)
    for prompt, answer, requests in PAGED_TINY if "--tiny" in flags else PAGED:
        seconds = batched(model, prompt, answer, requests)
        print(
            f"| transformers, continuous batching ({model.config._attn_implementation}), {prompt} in, {answer} out, {requests} requests "
            f"| {requests * answer / seconds:.0f} tok/s | | | |",
            flush=True,
        )


def batched(model, prompt, answer, requests):
    """Seconds of one call, including the recording of graphs and the allocation of the cache where this
    version does that in each call."""
    from transformers import GenerationConfig

    inputs = [random_ids(model.config.vocab_size, prompt, seed) for seed in range(requests)]
    # No token ends an answer.
    config = GenerationConfig(
        max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=inputs, generation_config=config, progress_bar=False)
    produced = sum(len(output.generated_tokens) for output in outputs.values())
    if produced != requests * answer:
        raise RuntimeError(f"{produced} tokens where {requests * answer} were asked for")
    return time.perf_counter() - start


if __name__ == "__main__":
    commands = dict(make=make, compare=compare, speed=speed, paged=paged, release=release)
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    sys.exit(bool(commands[sys.argv[1]](*sys.argv[2:])))
