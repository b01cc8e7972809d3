//! The archive of goldens: a gzip stream of one safetensors file.
//!
//! Its metadata has the key `goldens` with JSON: the release, how the archive was made, cases and
//! documents. Three tensors hold the documents' numbers: `ids` (u32, all documents one after the
//! other), `top_ids` (u32) and `top_logprobs` (f32), both of shape (rows, 64).

use super::{
    Case, Document, DocumentRow, Goldens, GoldensOrigin, TemplateCase, TokenizerCase,
    ToolConversation,
};
use flate2::read::GzDecoder;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;

const FORMAT: u32 = 1;
/// Likely tokens that a row holds.
const TOP: usize = 64;
/// Bytes of an unpacked archive: more than a hundred thousand rows.
const MAX_UNPACKED: u64 = 128 << 20;

/// Why an archive cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GoldensFault {
    #[error("it is no archive of goldens: {0}")]
    Container(String),
    #[error("it is of format {0}, and this build reads format {FORMAT}")]
    Format(u64),
    #[error("it contradicts itself: {0}")]
    Content(String),
}

fn container(error: impl std::fmt::Display) -> GoldensFault {
    GoldensFault::Container(error.to_string())
}

#[derive(Deserialize)]
struct Description {
    release: DescribedRelease,
    made: Making,
    ends: Vec<u32>,
    documents: Vec<DescribedDocument>,
    tokenizer: Vec<TokenizerCase>,
    template: Vec<TemplateCase>,
    /// Archives made before there was this section have none.
    #[serde(default)]
    tools: Vec<ToolConversation>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct DescribedRelease {
    name: String,
    weights_sha256: String,
    parameters: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct Making {
    by: String,
    at: String,
}

/// Row `first_row + i` is about the position `first_position + i * step` of the document.
#[derive(Deserialize)]
struct DescribedDocument {
    domain: String,
    begin: usize,
    tokens: usize,
    first_row: usize,
    first_position: usize,
    step: usize,
    rows: usize,
}

pub(super) fn read(archive: &[u8]) -> Result<Goldens, GoldensFault> {
    let unpacked = unpack(archive)?;
    let (_, header) = SafeTensors::read_metadata(&unpacked).map_err(container)?;
    let about = describe(header.metadata().as_ref().and_then(|all| all.get("goldens")))?;
    let numbers = Numbers::read(&SafeTensors::deserialize(&unpacked).map_err(container)?)?;
    let documents: Vec<Document> =
        about.documents.iter().map(|one| numbers.document(one)).collect::<Result<_, _>>()?;
    let DescribedRelease { name, weights_sha256, parameters } = about.release;
    Ok(Goldens {
        origin: GoldensOrigin {
            release: name,
            sha256: hex::encode(Sha256::digest(archive)),
            made_by: about.made.by,
            made_at: about.made.at,
            positions: documents.iter().map(|document| document.rows.len()).sum(),
            built_in: false,
        },
        weights_sha256,
        parameters,
        ends: about.ends,
        cases: about.cases,
        tokenizer: about.tokenizer,
        tool_conversations: about.tools,
        templates: about.template.into_iter().filter(|case| case.add_generation_prompt).collect(),
        documents,
    })
}

fn unpack(archive: &[u8]) -> Result<Vec<u8>, GoldensFault> {
    let mut unpacked = Vec::new();
    let read = GzDecoder::new(archive).take(MAX_UNPACKED + 1).read_to_end(&mut unpacked);
    if read.map_err(container)? as u64 > MAX_UNPACKED {
        return Err(container(format!("unpacked it has more than {} MiB", MAX_UNPACKED >> 20)));
    }
    Ok(unpacked)
}

fn describe(text: Option<&String>) -> Result<Description, GoldensFault> {
    let text = text.ok_or_else(|| container("its metadata has no key `goldens`"))?;
    let json: Value = serde_json::from_str(text).map_err(container)?;
    let format = json["format"].as_u64().unwrap_or_default();
    if format != u64::from(FORMAT) {
        return Err(GoldensFault::Format(format));
    }
    let about: Description = serde_json::from_value(json).map_err(container)?;
    if let Some(case) = about.cases.iter().find(|case| !is_sound(case)) {
        let why = format!("case {:?} does not hold the two best ids of each token", case.id);
        return Err(GoldensFault::Content(why));
    }
    if about.tokenizer.is_empty() || about.cases.is_empty() {
        return Err(GoldensFault::Content("it compares no text or no answer".into()));
    }
    Ok(about)
}

fn is_sound(case: &Case) -> bool {
    let best = |(id, [first, second]): (&u32, &[(u32, f32); 2])| {
        first.0 == *id && first.1 >= second.1 && second.1.is_finite()
    };
    case.greedy_ids.len() == case.top2.len() && case.greedy_ids.iter().zip(&case.top2).all(best)
}

/// The tensors of an archive, as words.
struct Numbers {
    ids: Vec<u32>,
    top_ids: Vec<u32>,
    top_logprobs: Vec<f32>,
}

impl Numbers {
    fn read(tensors: &SafeTensors) -> Result<Self, GoldensFault> {
        let words = |name: &str, dtype: Dtype| {
            let tensor = tensors.tensor(name).map_err(container)?;
            if tensor.dtype() != dtype {
                return Err(container(format!("the tensor {name} is of type {}", tensor.dtype())));
            }
            Ok(tensor.data().as_chunks::<4>().0.to_vec())
        };
        let ids = |name| {
            let words = words(name, Dtype::U32)?.into_iter().map(u32::from_le_bytes);
            Ok::<Vec<u32>, GoldensFault>(words.collect())
        };
        let logprobs = words("top_logprobs", Dtype::F32)?.into_iter().map(f32::from_le_bytes);
        Ok(Self { ids: ids("ids")?, top_ids: ids("top_ids")?, top_logprobs: logprobs.collect() })
    }

    fn document(&self, one: &DescribedDocument) -> Result<Document, GoldensFault> {
        self.within_bounds(one).ok_or_else(|| {
            GoldensFault::Content(format!(
                "the description of the document {:?} does not fit its numbers",
                one.domain
            ))
        })
    }

    /// `None` when the description points outside the numbers, or they are no log-probabilities.
    fn within_bounds(&self, one: &DescribedDocument) -> Option<Document> {
        let ids = self.ids.get(range(one.begin, one.tokens)?)?.to_vec();
        let mut rows = Vec::new();
        for at in 0..one.rows {
            let position = one.first_position.checked_add(at.checked_mul(one.step)?)?;
            let place = range(one.first_row.checked_add(at)?.checked_mul(TOP)?, TOP)?;
            let logprobs = self.top_logprobs.get(place.clone())?;
            let sound = logprobs.is_sorted_by(|a, b| a >= b) && logprobs.iter().all(|p| *p <= 1e-3);
            if position >= ids.len() || !sound || (at > 0 && one.step == 0) {
                return None;
            }
            let top = self.top_ids.get(place)?.iter().copied().zip(logprobs.iter().copied());
            rows.push(DocumentRow { position, top: top.collect() });
        }
        Some(Document { domain: one.domain.clone(), ids, rows })
    }
}

fn range(begin: usize, length: usize) -> Option<Range<usize>> {
    Some(begin..begin.checked_add(length)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::archives::{archive, pack};
    use crate::testing::fake;
    use serde_json::json;

    #[test]
    fn what_was_packed_is_read() {
        let goldens = fake::goldens();
        let packed = pack(&goldens);
        let read = super::read(&packed).unwrap();
        let positions = goldens.documents[0].rows.len();
        assert_eq!(read.origin.sha256, hex::encode(Sha256::digest(&packed)));
        assert_eq!((read.origin.positions, read.origin.built_in), (positions, false));
        assert_eq!(Goldens { origin: goldens.origin.clone(), ..read }, goldens);
    }

    fn about(document: &Value) -> Value {
        json!({
            "format": 1,
            "release": { "name": "r", "weights_sha256": "0", "parameters": {} },
            "made": { "by": "b", "at": "2026-11-22" },
            "ends": [], "documents": [document], "template": [],
            "tokenizer": [{ "text": "t", "ids": [1] }],
            "cases": [{ "id": "c", "messages": [], "prompt_ids": [1], "greedy_ids": [], "top2": [] }],
        })
    }

    fn document(key: &str, value: u64) -> Value {
        let mut document = json!({
            "domain": "code", "begin": 0, "tokens": 4, "first_row": 0, "first_position": 1,
            "step": 1, "rows": 2,
        });
        document[key] = value.into();
        document
    }

    fn falling(rows: usize) -> Vec<f32> {
        (0..rows).flat_map(|_| (0..TOP).map(|at| -1.0 - at as f32)).collect()
    }

    fn refusal(about: &Value, logprobs: &[f32]) -> String {
        let top_ids = vec![7; logprobs.len()];
        let packed = archive(about, &[1, 2, 3, 4], &top_ids, logprobs);
        super::read(&packed).map_or_else(|why| why.to_string(), |_| String::new())
    }

    #[test]
    fn an_archive_that_contradicts_itself_is_refused() {
        assert_eq!(refusal(&about(&document("rows", 2)), &falling(2)), "");
        for (key, value) in [
            ("begin", 1),
            ("begin", u64::MAX),
            ("tokens", 5),
            ("first_row", 1),
            ("first_row", u64::MAX / 2),
            ("first_position", 3),
            ("rows", 3),
            ("step", 0),
            ("step", u64::MAX),
        ] {
            let why = refusal(&about(&document(key, value)), &falling(2));
            assert_eq!(
                why,
                "it contradicts itself: the description of the document \"code\" does not fit its \
                 numbers"
            );
        }
        for wrong in [f32::NAN, f32::INFINITY, 0.5] {
            let mut logprobs = falling(2);
            logprobs[TOP] = wrong;
            assert!(refusal(&about(&document("rows", 2)), &logprobs).contains("contradicts"));
        }
        let mut unequal = about(&document("rows", 2));
        unequal["cases"] = json!([{
            "id": "c", "messages": [], "prompt_ids": [1], "greedy_ids": [5],
            "top2": [[[6, 1.0], [5, 0.5]]],
        }]);
        assert!(refusal(&unequal, &falling(2)).contains("case \"c\""));
        let mut empty = about(&document("rows", 2));
        empty["cases"] = json!([]);
        assert!(refusal(&empty, &falling(2)).contains("no answer"));
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        let mut newer = about(&document("rows", 2));
        newer["format"] = 2.into();
        assert_eq!(
            refusal(&newer, &falling(2)),
            "it is of format 2, and this build reads format 1"
        );
        let whole = pack(&fake::goldens());
        for bytes in [&b""[..], b"PK\x03\x04", &whole[..whole.len() / 2], &whole[..40]] {
            let why = super::read(bytes).unwrap_err().to_string();
            assert!(why.starts_with("it is no archive of goldens"), "{why}");
        }
    }
}
