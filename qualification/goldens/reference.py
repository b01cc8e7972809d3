"""The reference: Hugging Face transformers with eager attention on the CPU."""

import gguf
import numpy
import torch
import transformers

from source import Refused

TOP = 64
# Tokens of one forward pass. Longer texts go through the cache, which bounds the memory.
CHUNK = 512
# Rows of the vocabulary's size that are normalised at a time.
ROWS = 64


class Reference:
    """A release's model in one type."""

    def __init__(self, source, dtype=torch.float32):
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                **source.loading(), dtype=dtype, attn_implementation="eager"
            ).eval()
        except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise Refused(
                f"transformers cannot load {source.path}: {first}; give the release's folder of "
                "safetensors, or use another version"
            ) from error

    def cache(self):
        return transformers.DynamicCache(config=self.model.config)

    def logits(self, ids, cache=None, keep=0):
        """Logits in f32 of a batch of ids, of the last `keep` positions or of those in a tensor."""
        with torch.inference_mode():
            found = self.model(
                ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep
            )
        return found.logits.float()

    def scored(self, ids, positions):
        """Yields the logits at the positions (ascending), some rows at a time."""
        cache = self.cache() if len(ids) > 2 * CHUNK else None
        step = CHUNK if cache else len(ids)
        for first in range(0, len(ids), step):
            here = [at - first for at in positions if first <= at < first + step]
            part = torch.tensor([ids[first : first + step]])
            keep = torch.tensor(here) if here else 1
            rows = self.logits(part, cache, keep)[0]
            for at in range(0, len(here), ROWS):
                yield rows[at : at + ROWS]


def normaliser(logits):
    """The logarithm of the sum of exponentials of every row, in f64."""
    return torch.logsumexp(logits.double(), dim=-1, keepdim=True)


def most_likely(scored):
    """Ids and log-probabilities of the most likely tokens of every row."""
    ids, logprobs = [], []
    for logits in scored:
        values, best = logits.topk(TOP)
        ids.append(best.numpy().astype("<u4"))
        logprobs.append((values.double() - normaliser(logits)).numpy())
    return numpy.concatenate(ids), numpy.concatenate(logprobs)


def likelihoods(scored, ids):
    """The log-probabilities that another model gives to the ids of every row."""
    found, at = [], 0
    for logits in scored:
        wanted = torch.from_numpy(ids[at : at + len(logits)].astype("i8"))
        found.append((logits.double().gather(1, wanted) - normaliser(logits)).numpy())
        at += len(logits)
    return numpy.concatenate(found)


def check_weights(source, model):
    """The file's tensors, dequantised here, are those that transformers' loader made of them.

    The families of the Llama kind are compared; of others the second witness has to be enough.
    """
    if source.is_folder or source.architecture not in ("llama", "qwen2", "qwen3"):
        return 0
    config, state = model.config, model.state_dict()
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[source.architecture.upper()], config.num_hidden_layers
    )
    heads = {}
    if source.architecture == "llama":
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors, compared = {tensor.name: tensor for tensor in source.reader.tensors}, set()
    for name, ours in state.items():
        tensor = tensors.get(names.get_name(name, (".weight", ".bias")) or "")
        if tensor is None:
            continue
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        if count := heads.get(name.split(".")[-2]):
            weight = halves_apart(weight, count)
        if not numpy.array_equal(weight, ours.numpy()):
            raise Refused(f"transformers loads {tensor.name} differently: use another version")
        compared.add(tensor.name)
    left = sorted(set(tensors) - compared)
    if left:
        raise Refused(
            f"transformers does not load {', '.join(left[:5])} of the file: give the release's "
            "folder of safetensors, or use another version"
        )
    return len(compared)


def halves_apart(weight, heads):
    """GGUF interleaves both halves of a rotary pair in Q and K; Hugging Face keeps them apart."""
    rows = weight.shape[0]
    parts = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def greedy_case(reference, prompt, count):
    """Greedy tokens, past the end of the answer, with the two highest logits at every step."""
    name, messages, prompt_ids = prompt
    cache, ids, top2 = reference.cache(), prompt_ids, []
    for _ in range(count):
        values, best = reference.logits(torch.tensor([ids]), cache, 1)[0, -1].topk(2)
        top2.append([[best[at].item(), round(values[at].item(), 5)] for at in range(2)])
        ids = [best[0].item()]
    return {
        "id": name,
        "messages": messages,
        "prompt_ids": prompt_ids,
        "greedy_ids": [best[0] for best, _ in top2],
        "top2": top2,
    }
