//! Archives of goldens as `goldens/make_goldens.py` writes them.

use crate::goldens::{Case, Goldens, TemplateCase, TokenizerCase};
use flate2::Compression;
use flate2::write::GzEncoder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::Write;

/// Packs goldens whose rows each hold 64 tokens at consecutive positions.
pub fn pack(goldens: &Goldens) -> Vec<u8> {
    let (mut ids, mut rows, mut documents) = (Vec::new(), Vec::new(), Vec::new());
    for document in &goldens.documents {
        documents.push(json!({
            "domain": document.domain, "begin": ids.len(), "tokens": document.ids.len(),
            "first_row": rows.len(), "rows": document.rows.len(), "step": 1,
            "first_position": document.rows.first().map_or(0, |row| row.position),
        }));
        ids.extend(&document.ids);
        rows.extend(&document.rows);
    }
    let origin = &goldens.origin;
    let about = json!({
        "format": 1,
        "release": {
            "name": origin.release, "weights_sha256": goldens.weights_sha256,
            "parameters": goldens.parameters,
        },
        "made": { "by": origin.made_by, "at": origin.made_at },
        "ends": goldens.ends,
        "documents": documents,
        "tokenizer": goldens.tokenizer.iter().map(tokenizer).collect::<Vec<_>>(),
        "template": goldens.templates.iter().map(template).collect::<Vec<_>>(),
        "tools": goldens.tool_conversations,
        "cases": goldens.cases.iter().map(case).collect::<Vec<_>>(),
    });
    let top = || rows.iter().flat_map(|row| &row.top);
    archive(
        &about,
        &ids,
        &top().map(|(id, _)| *id).collect::<Vec<_>>(),
        &top().map(|(_, p)| *p).collect::<Vec<_>>(),
    )
}

fn tokenizer(case: &TokenizerCase) -> Value {
    json!({ "text": case.text, "ids": case.ids, "special_ids": case.special_ids })
}

fn template(case: &TemplateCase) -> Value {
    json!({ "messages": case.messages, "add_generation_prompt": true, "prompt": case.prompt })
}

fn case(case: &Case) -> Value {
    json!({
        "id": case.id, "messages": case.messages, "prompt_ids": case.prompt_ids,
        "greedy_ids": case.greedy_ids, "top2": case.top2,
    })
}

/// An archive with this description and these numbers, whatever they are.
pub fn archive(about: &Value, ids: &[u32], top_ids: &[u32], top_logprobs: &[f32]) -> Vec<u8> {
    let words = |all: &[u32]| all.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let rows = top_ids.len() / 64;
    let logprobs: Vec<u32> = top_logprobs.iter().map(|p| p.to_bits()).collect();
    let (ids, top_ids, logprobs) = ((ids.len(), words(ids)), words(top_ids), words(&logprobs));
    let view = |dtype, shape, bytes| TensorView::new(dtype, shape, bytes).expect("the shape fits");
    let tensors = [
        ("ids", view(Dtype::U32, vec![ids.0], &ids.1)),
        ("top_ids", view(Dtype::U32, vec![rows, 64], &top_ids)),
        ("top_logprobs", view(Dtype::F32, vec![rows, 64], &logprobs)),
    ];
    let metadata = HashMap::from([("goldens".to_owned(), about.to_string())]);
    let plain = serialize(tensors, Some(metadata)).expect("its names are unique");
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(&plain).expect("memory takes all");
    packed.finish().expect("memory takes all")
}
