//! Faults in the file of a release: what conversions, quantisations and downloads have got wrong.

use cresset_models::loader::gguf::Value;
use cresset_models::testing::GgufWriter;

/// A change of a file, with the check that has to name it.
pub(super) struct FileFault {
    pub what: &'static str,
    pub check: &'static str,
    /// Whether a sister's outputs are enough to find it.
    pub shows_beside_a_sister: bool,
    /// False where the file has nothing to change.
    pub plant: fn(&mut GgufWriter) -> bool,
}

impl FileFault {
    const fn new(
        what: &'static str,
        check: &'static str,
        plant: fn(&mut GgufWriter) -> bool,
    ) -> Self {
        Self { what, check, shows_beside_a_sister: false, plant }
    }

    const fn also_beside_a_sister(self) -> Self {
        Self { shows_beside_a_sister: true, ..self }
    }
}

pub(super) const FILE_FAULTS: &[FileFault] = &[
    FileFault::new("one byte is another", "digests", flip_byte),
    FileFault::new("layers stand in another order", "distributions", turn_layers)
        .also_beside_a_sister(),
    FileFault::new("gate and up are swapped", "distributions", swap_gate_and_up)
        .also_beside_a_sister(),
    FileFault::new("two layers' queries are swapped", "distributions", swap_queries)
        .also_beside_a_sister(),
    FileFault::new("the output head is a tenth too large", "distributions", scale_head),
    FileFault::new(
        "queries stand in the order of the other rotation",
        "distributions",
        permute_queries,
    )
    .also_beside_a_sister(),
    FileFault::new("two heads' keys are swapped", "distributions", swap_key_heads)
        .also_beside_a_sister(),
    FileFault::new("a layer's two norms are swapped", "distributions", swap_norms)
        .also_beside_a_sister(),
    FileFault::new("every token has the vector of the next one", "distributions", shift_embeddings)
        .also_beside_a_sister(),
    FileFault::new("the base of the rotation is a tenth too large", "distributions", |file| {
        multiply(file, ".rope.freq_base", 1.1)
    })
    .also_beside_a_sister(),
    FileFault::new("the base of the rotation is a tenth too small", "distributions", |file| {
        multiply(file, ".rope.freq_base", 0.9)
    })
    .also_beside_a_sister(),
    FileFault::new("a bit of an exponent is another", "weights", flip_exponent),
    FileFault::new(
        "a bit of an exponent in a small tensor is another",
        "weights",
        flip_norm_exponent,
    ),
    FileFault::new("a tensor is zero", "weights", zero_tensor),
    FileFault::new("a weight is not a number", "weights", not_a_number),
    FileFault::new("the base of the rotation is ten times as large", "hyper_parameters", turn_base)
        .also_beside_a_sister(),
    FileFault::new(
        "the norms' epsilon is a hundred times as large",
        "hyper_parameters",
        raise_epsilon,
    )
    .also_beside_a_sister(),
    FileFault::new("the context is overstated four times", "hyper_parameters", overstate_context)
        .also_beside_a_sister(),
    FileFault::new("the rotation is said to be stretched", "hyper_parameters", stretch_rotation)
        .also_beside_a_sister(),
    FileFault::new("the last layer is left out", "hyper_parameters", drop_layer)
        .also_beside_a_sister(),
    FileFault::new("two tokens have changed places", "tokenizer_goldens", swap_tokens)
        .also_beside_a_sister(),
    FileFault::new("the merges stand in another order", "tokenizer_goldens", turn_merges)
        .also_beside_a_sister(),
    FileFault::new(
        "text is cut up by the rules of another family",
        "tokenizer_goldens",
        other_rules,
    )
    .also_beside_a_sister(),
    FileFault::new("a special token is an ordinary one", "special_tokens", unmark_special),
    FileFault::new("the template never asks for an answer", "turns", no_prompt),
    FileFault::new("the template writes one blank more", "template_goldens", blank)
        .also_beside_a_sister(),
    FileFault::new("the template is another family's", "template_goldens", other_template)
        .also_beside_a_sister(),
    FileFault::new("the template leaves system messages out", "template_goldens", no_system)
        .also_beside_a_sister(),
    FileFault::new("another token ends an answer", "end_of_turn", other_end),
];

/// Changes that no check may take for a fault.
pub(super) const HARMLESS: &[FileFault] = &[
    FileFault::new(
        "add_bos_token is the other one, and the template says what it wrote",
        "",
        flip_add_bos,
    ),
    FileFault::new("one more id is declared to end an answer", "", more_ends),
    FileFault::new("the model has another name", "", rename),
    FileFault::new("the tensors stand in another order", "", reverse_tensors),
    FileFault::new("the file was written anew", "", |_| true),
];

fn flip_byte(file: &mut GgufWriter) -> bool {
    // A low byte of a value in the middle of the last tensor: no other check need see it.
    let Some((.., data)) = file.tensors.last_mut() else { return false };
    let middle = data.len() / 2;
    data[middle] ^= 1;
    true
}

/// The names of a layer's tensors, such as `blk.0.ffn_up.weight`, with the same of another layer.
fn pairs(file: &GgufWriter, part: &str) -> Vec<(String, String)> {
    let own = |name: &str| name.starts_with("blk.") && name.ends_with(&format!(".{part}.weight"));
    let layers = file.tensors.iter().filter(|(name, ..)| own(name)).count();
    let name = |layer: usize| format!("blk.{}.{part}.weight", layer % layers);
    (0..layers).map(|layer| (name(layer), name(layer + 1))).collect()
}

/// Swaps the contents of two tensors of the same type and shape.
fn swap(file: &mut GgufWriter, a: &str, b: &str) -> bool {
    let place = |name: &str| file.tensors.iter().position(|(own, ..)| own == name);
    let (Some(a), Some(b)) = (place(a), place(b)) else { return false };
    let same = file.tensors[a].2 == file.tensors[b].2 && file.tensors[a].1 == file.tensors[b].1;
    if same && a != b {
        let taken = std::mem::take(&mut file.tensors[a].3);
        file.tensors[a].3 = std::mem::replace(&mut file.tensors[b].3, taken);
    }
    same && a != b
}

fn turn_layers(file: &mut GgufWriter) -> bool {
    let parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let mut turned = 0;
    for part in parts {
        let layers = pairs(file, part);
        // The last one has come to its place by then.
        let others = &layers[..layers.len().saturating_sub(1)];
        turned += others.iter().filter(|(a, b)| swap(file, a, b)).count();
    }
    turned > 0
}

fn swap_gate_and_up(file: &mut GgufWriter) -> bool {
    let layers = pairs(file, "ffn_up");
    let gate = |up: &str| up.replace("ffn_up", "ffn_gate");
    layers.iter().filter(|(up, _)| swap(file, up, &gate(up))).count() > 0
}

fn swap_queries(file: &mut GgufWriter) -> bool {
    pairs(file, "attn_q").first().is_some_and(|(a, b)| swap(file, a, b))
}

fn scale_head(file: &mut GgufWriter) -> bool {
    let Some(data) = file.data("output_norm.weight") else { return false };
    for value in data.as_chunks_mut::<4>().0 {
        *value = (f32::from_le_bytes(*value) * 1.1).to_le_bytes();
    }
    true
}

/// The rows of a tensor of two dimensions: the number of bytes of each.
fn row_bytes(file: &GgufWriter, name: &str) -> Option<usize> {
    let (_, shape, _, data) = file.tensors.iter().find(|(own, ..)| own == name)?;
    Some(data.len() / shape.first()?)
}

/// Puts the rows of a tensor in another order: row `r` comes from `from(r)`.
fn reorder(file: &mut GgufWriter, name: &str, from: impl Fn(usize) -> usize) -> bool {
    let Some(row) = row_bytes(file, name) else { return false };
    let Some(data) = file.data(name) else { return false };
    let own = data.clone();
    for (place, to) in data.chunks_exact_mut(row).enumerate() {
        to.copy_from_slice(&own[from(place) * row..][..row]);
    }
    own != *data
}

/// The dimensions of a head.
fn head_dim(file: &GgufWriter) -> Option<usize> {
    let number = |ending: &str| {
        let (_, value) = file.metadata.iter().find(|(key, _)| key.ends_with(ending))?;
        value.as_usize()
    };
    Some(number(".embedding_length")? / number(".attention.head_count")?)
}

fn permute_queries(file: &mut GgufWriter) -> bool {
    let Some(dim) = head_dim(file) else { return false };
    reorder(file, "blk.0.attn_q.weight", |row| {
        let (head, own) = (row / dim, row % dim);
        head * dim + (own % 2) * (dim / 2) + own / 2
    })
}

fn swap_key_heads(file: &mut GgufWriter) -> bool {
    let Some(dim) = head_dim(file) else { return false };
    reorder(file, "blk.0.attn_k.weight", |row| match row / dim {
        0 => row + dim,
        1 => row - dim,
        _ => row,
    })
}

fn swap_norms(file: &mut GgufWriter) -> bool {
    swap(file, "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
}

fn shift_embeddings(file: &mut GgufWriter) -> bool {
    const NAME: &str = "token_embd.weight";
    let Some((_, shape, ..)) = file.tensors.iter().find(|(own, ..)| own == NAME) else {
        return false;
    };
    let tokens = shape[0];
    reorder(file, NAME, |token| (token + 1) % tokens)
}

/// The top bit of the exponent of a block's scale, or of a value: a factor of 2^16 or more.
fn flip_exponent(file: &mut GgufWriter) -> bool {
    flip_exponent_of(file, "blk.1.ffn_up.weight")
}

/// No other layer has such a tensor, and its few values leave little room for outliers.
fn flip_norm_exponent(file: &mut GgufWriter) -> bool {
    flip_exponent_of(file, "output_norm.weight")
}

fn flip_exponent_of(file: &mut GgufWriter, name: &str) -> bool {
    let found = file.tensors.iter_mut().find(|(own, ..)| own == name);
    let Some((_, shape, _, data)) = found else { return false };
    let is_f32 = data.len() == 4 * shape.iter().product::<usize>();
    // With that bit, a value from one to two is infinite, which is found for itself.
    let small = |value: &[u8; 4]| f32::from_le_bytes(*value).abs() < 1.0;
    let place = is_f32.then(|| data.as_chunks::<4>().0.iter().position(small));
    data[place.flatten().map_or(1, |value| 4 * value + 3)] ^= 0x40;
    true
}

fn zero_tensor(file: &mut GgufWriter) -> bool {
    let Some(data) = file.data("blk.1.ffn_down.weight") else { return false };
    data.fill(0);
    true
}

fn not_a_number(file: &mut GgufWriter) -> bool {
    let Some(data) = file.data("blk.1.ffn_norm.weight") else { return false };
    data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    true
}

/// Multiplies the number of the first key that ends so.
fn multiply(file: &mut GgufWriter, ending: &str, by: f32) -> bool {
    let found = file.metadata.iter_mut().find(|(key, _)| key.ends_with(ending));
    let Some((_, value)) = found else { return false };
    match value {
        Value::F32(number) => *number *= by,
        Value::U32(number) => *number = (*number as f32 * by) as u32,
        _ => return false,
    }
    true
}

fn turn_base(file: &mut GgufWriter) -> bool {
    multiply(file, ".rope.freq_base", 10.0)
}

fn stretch_rotation(file: &mut GgufWriter) -> bool {
    let Some(family) = file.get("general.architecture").and_then(Value::as_str) else {
        return false;
    };
    let key = |name: &str| format!("{family}.rope.scaling.{name}");
    let (kind, factor) = (key("type"), key("factor"));
    file.set(&kind, Value::String("linear".into()));
    file.set(&factor, Value::F32(2.0));
    true
}

fn drop_layer(file: &mut GgufWriter) -> bool {
    let found = file.metadata.iter_mut().find(|(key, _)| key.ends_with(".block_count"));
    let Some((_, Value::U32(layers))) = found else { return false };
    *layers -= 1;
    let last = format!("blk.{layers}.");
    file.tensors.retain(|(name, ..)| !name.starts_with(&last));
    true
}

fn raise_epsilon(file: &mut GgufWriter) -> bool {
    multiply(file, ".layer_norm_rms_epsilon", 100.0)
}

fn overstate_context(file: &mut GgufWriter) -> bool {
    multiply(file, ".context_length", 4.0)
}

/// Changes the list of a key.
fn list(file: &mut GgufWriter, key: &str, change: fn(&mut Vec<Value>)) -> bool {
    match file.metadata.iter_mut().find(|(own, _)| own == key) {
        Some((_, Value::Array(values))) if values.len() > 2 => change(values),
        _ => return false,
    }
    true
}

fn swap_tokens(file: &mut GgufWriter) -> bool {
    list(file, "tokenizer.ggml.tokens", |tokens| {
        let letter = |wanted: &str| tokens.iter().position(|t| t.as_str() == Some(wanted));
        if let (Some(a), Some(b)) = (letter("a"), letter("e")) {
            tokens.swap(a, b);
        }
    })
}

fn turn_merges(file: &mut GgufWriter) -> bool {
    list(file, "tokenizer.ggml.merges", |merges| merges.reverse())
}

/// The merges of a small vocabulary do not show where text is cut.
fn other_rules(file: &mut GgufWriter) -> bool {
    const KEY: &str = "tokenizer.ggml.pre";
    const FEW: usize = 1_000;
    let merges = file.get("tokenizer.ggml.merges");
    if !matches!(merges, Some(Value::Array(merges)) if merges.len() > FEW) {
        return false;
    }
    let is_other = file.get(KEY).and_then(Value::as_str) == Some("qwen2");
    file.set(KEY, Value::String(if is_other { "llama-bpe" } else { "qwen2" }.into()));
    true
}

fn unmark_special(file: &mut GgufWriter) -> bool {
    const NORMAL: i32 = 1;
    list(file, "tokenizer.ggml.token_type", |types| {
        for kind in types.iter_mut().filter(|kind| matches!(kind, Value::I32(3 | 4))) {
            *kind = Value::I32(NORMAL);
        }
    })
}

/// Changes the template's text.
fn template(file: &mut GgufWriter, change: fn(&str) -> String) -> bool {
    const KEY: &str = "tokenizer.chat_template";
    let Some(text) = file.get(KEY).and_then(Value::as_str).map(change) else { return false };
    file.set(KEY, Value::String(text));
    true
}

fn no_prompt(file: &mut GgufWriter) -> bool {
    template(file, |text| text.replace("add_generation_prompt", "false"))
}

fn blank(file: &mut GgufWriter) -> bool {
    template(file, |text| format!("{{{{ ' ' }}}}{text}"))
}

fn other_template(file: &mut GgufWriter) -> bool {
    template(file, |_| {
        "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}\
         {% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"
            .into()
    })
}

fn no_system(file: &mut GgufWriter) -> bool {
    template(file, |text| {
        format!(
            "{{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}}\
             {text}"
        )
    })
}

/// An ordinary letter is declared to end an answer.
fn other_end(file: &mut GgufWriter) -> bool {
    let Some(Value::Array(tokens)) = file.get("tokenizer.ggml.tokens") else { return false };
    let Some(letter) = tokens.iter().position(|token| token.as_str() == Some("a")) else {
        return false;
    };
    file.set("tokenizer.ggml.eos_token_id", Value::U32(letter as u32));
    true
}

/// Text may end an answer as well as the end of a turn does.
fn more_ends(file: &mut GgufWriter) -> bool {
    file.set("tokenizer.ggml.eot_token_id", Value::U32(0));
    true
}

fn flip_add_bos(file: &mut GgufWriter) -> bool {
    const KEY: &str = "tokenizer.ggml.add_bos_token";
    let flipped = !file.get(KEY).and_then(Value::as_bool).unwrap_or(false);
    file.set(KEY, Value::Bool(flipped));
    true
}

fn rename(file: &mut GgufWriter) -> bool {
    file.set("general.name", Value::String("Another Name".into()));
    true
}

fn reverse_tensors(file: &mut GgufWriter) -> bool {
    file.tensors.reverse();
    true
}
