"""Makes the goldens of the heads that guess tokens ("multi-token prediction"): their logits.

    PYTHONPATH=LLAMA_CPP/gguf-py:LLAMA_CPP python make_guess_goldens.py OUT_FOLDER

The models are cases of `make_architecture_goldens.py` with a head behind their layers. Transformers
has no such heads, so this file computes them: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, where
the checkpoints of all three families have the embedding's half of the matrix first, and the state
of the model is that behind its final norm. Only the head's layer is transformers' own.
"""

import json
import pathlib
import sys
import tempfile

import safetensors.torch
import torch
from make_architecture_goldens import CASES, SHAPE, case, converted, model_of, weights
from transformers.masking_utils import create_causal_mask

# Tokens that the head goes on to guess behind the last one, each from its own state.
CHAINED = 3
CHOSEN = ["deepseek-v3", "glm4-moe", "qwen3.5", "qwen3.5-moe"]
HIDDEN = SHAPE["hidden_size"]


def names_of(kind, layers):
    """The beginning of the layer's names, and the names of matrix, of the norms of embedding and of state, and of the last norm."""
    if kind.startswith("qwen3_5"):
        own = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
        return "mtp.layers.0.", [f"mtp.{name}.weight" for name in own]
    layer = f"model.layers.{layers}."
    own = ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
    return layer, [f"{layer}{name}.weight" for name in own]


def rms_norm(x, weight, config):
    """Qwen 3.5 stores what its weights are more than one."""
    weight = weight + 1 if config.model_type.startswith("qwen3_5") else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def head_logits(model, block, own, states, ids):
    """Logits and states of the head at all positions: `states` there, and `ids` of the tokens behind them."""
    config = model.config
    matrix, of_embedding, of_state, last = own
    embedded = model.model.embed_tokens(ids)
    pair = torch.cat(
        [rms_norm(embedded, of_embedding, config), rms_norm(states, of_state, config)], -1
    )
    x = (pair @ matrix.T)[None]
    positions = torch.arange(len(ids))[None]
    mask = create_causal_mask(
        config=config,
        inputs_embeds=x,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    rotated = model.model.rotary_emb(x, positions)
    x = block(x, position_embeddings=rotated, attention_mask=mask, position_ids=positions)
    x = x[0] if isinstance(x, tuple) else x
    states = rms_norm(x[0], last, config)
    return model.lm_head(states), states


def head_of(model, stored, dtype, kind):
    """The number of the last of the model's layers with attention, which is like the head's; the shapes of the head's tensors; and those of its layer by the names that they would have there."""
    layers = model.config.num_hidden_layers
    like = max(at for at in range(layers) if f"model.layers.{at}.self_attn.o_proj.weight" in stored)
    there, (prefix, own) = f"model.layers.{like}.", names_of(kind, layers)
    renamed = {prefix + key.removeprefix(there): key for key in stored if key.startswith(there)}
    shapes = {name: list(stored[key].shape) for name, key in renamed.items()}
    shapes |= {own[0]: [HIDDEN, 2 * HIDDEN]} | {name: [HIDDEN] for name in own[1:]}
    tensors = {name: weights(name, shape, dtype, kind) for name, shape in shapes.items()}
    own = [tensors[name].float() for name in own]
    return like, shapes, own, {key: tensors[name] for name, key in renamed.items()}, tensors


def golden(settings, folder):
    _, described = case(*settings, folder)
    kind, dtype = settings[1:3]
    file = folder / "model.safetensors"
    model, stored = model_of(folder), safetensors.torch.load_file(file)
    like, shapes, own, layer, tensors = head_of(model, stored, dtype, kind)
    # Transformers reads the head's layer in the place of one of the model's.
    safetensors.torch.save_file(stored | layer, file, metadata={"format": "pt"})
    block = model_of(folder).model.layers[like]
    tokens, guesses = torch.tensor(described["tokens"]), []
    with torch.inference_mode():
        states = model.model(tokens[None]).last_hidden_state[0]
        # The token behind the last one is not known.
        states, ids = states[:-1], tokens[1:]
        while len(guesses) < CHAINED:
            logits, own_states = head_logits(model, block, own, states, ids)
            guesses.append(int(logits[-1].argmax()))
            states = torch.cat([states, own_states[-1:]])
            ids = torch.cat([ids, torch.tensor(guesses[-1:])])
    config = dict(described["config"])
    if kind.startswith("qwen3_5"):
        config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(stored | tensors, file, metadata={"format": "pt"})
    return logits, described | {
        "config": config,
        "tensors": described["tensors"] | shapes,
        # The converter leaves out the heads of DeepSeek.
        "gguf": None if kind == "deepseek_v3" else converted(folder, heads=True),
        "guesses": guesses,
    }


def main(out):
    torch.use_deterministic_algorithms(True)
    wanted, cases = {}, []
    for settings in CASES:
        if settings[0] in CHOSEN:
            with tempfile.TemporaryDirectory() as folder:
                wanted[settings[0]], described = golden(settings, pathlib.Path(folder))
                cases.append(described)
    safetensors.torch.save_file(wanted, out / "guesses.safetensors")
    lines = ",\n".join(json.dumps(described, separators=(",", ":")) for described in cases)
    (out / "guesses.json").write_text(f'{{"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
