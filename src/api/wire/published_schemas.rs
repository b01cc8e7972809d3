//! Measures formats with a published collection: which schemas are accepted, what refuses the
//! others, whether instances that a schema forbids can be written, and what masks cost.

#![allow(clippy::disallowed_methods, reason = "a measurement reads clocks and the environment")]

use super::chat_request::ChatRequest;
use super::json::JsonTree;
use cresset_models::ModelSource;
use cresset_request::AnswerFormat;
use cresset_text::TextModel;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Default)]
struct Findings {
    schemas: usize,
    accepted: usize,
    reasons: BTreeMap<String, usize>,
    /// Instances that are written as their test says, and the names of the others.
    as_told: usize,
    forbidden_but_written: Vec<String>,
    allowed_but_cut: Vec<String>,
    compiled: Vec<Duration>,
    masks: Vec<Duration>,
}

/// Reads the documents `*.json` of the folder `CRESSET_BENCH_SCHEMAS`, each with a `schema` and
/// `tests` (`data`, `valid`), as JSONSchemaBench's MaskBench has them, and takes the vocabulary of
/// the GGUF file `CRESSET_BENCH_MODEL`.
#[test]
#[ignore = "a measurement: needs a collection of schemas"]
fn formats_of_a_published_collection() {
    let setting = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let model = ModelSource::gguf(setting("CRESSET_BENCH_MODEL").into());
    let mut text = TextModel::load(&model).unwrap();
    // Instances have members that their schemas do not name.
    text.formats.open_objects = true;
    let folder = setting("CRESSET_BENCH_SCHEMAS");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut findings = Findings::default();
    for file in files {
        let document = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        findings.look_at(&text, &file, &document);
    }
    findings.tell();
}

impl Findings {
    fn look_at(&mut self, text: &TextModel, file: &Path, document: &Value) {
        self.schemas += 1;
        let format = match format_of(&document["schema"]) {
            Ok(format) => format,
            Err(why) => return self.refused(&why),
        };
        let began = Instant::now();
        let grammar = text.compile(&format);
        self.compiled.push(began.elapsed());
        let grammar = match grammar {
            Ok(grammar) => grammar,
            Err(why) => return self.refused(&why.to_string()),
        };
        self.accepted += 1;
        for test in document["tests"].as_array().into_iter().flatten() {
            let written = self.write(text, &grammar.start(), &test["data"]);
            let name = || format!("{} {}", file.display(), test["data"]);
            match (test["valid"] == true, written) {
                (true, false) => self.allowed_but_cut.push(name()),
                (false, true) => self.forbidden_but_written.push(name()),
                _ => self.as_told += 1,
            }
        }
    }

    fn refused(&mut self, why: &str) {
        let (path, reason) = why.split_once(' ').unwrap_or_default();
        let keyword = path.rsplit('.').next().unwrap_or_default();
        *self.reasons.entry(format!("{keyword} {reason}")).or_default() += 1;
    }

    /// Whether a model can write the instance to its end.
    fn write(
        &mut self,
        text: &TextModel,
        place: &cresset_text::GrammarPlace,
        instance: &Value,
    ) -> bool {
        let ids = text.tokenizer.encode(&instance.to_string(), false).unwrap();
        for (index, next) in ids.iter().chain(&text.eos_ids[..1]).enumerate() {
            let began = Instant::now();
            let Ok(mask) = place.allowed_after(&ids[..index]) else { return false };
            self.masks.push(began.elapsed());
            if mask[*next as usize / 32] >> (next % 32) & 1 == 0 {
                return false;
            }
        }
        true
    }

    fn tell(mut self) {
        println!("{} schemas, {} accepted", self.schemas, self.accepted);
        let mut reasons: Vec<_> = self.reasons.into_iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (reason, count) in reasons.iter().take(40) {
            println!("  {count} {reason}");
        }
        println!("{} instances as told", self.as_told);
        for (what, names) in
            [("written", self.forbidden_but_written), ("cut", self.allowed_but_cut)]
        {
            println!("{} wrongly {what}", names.len());
            for name in names.iter().take(60) {
                println!("  {}", name.chars().take(300).collect::<String>());
            }
        }
        for (what, times) in [("compiling", &mut self.compiled), ("a mask", &mut self.masks)] {
            times.sort();
            let at = |share: usize| times[(times.len() - 1) * share / 1_000].as_secs_f64() * 1e6;
            println!(
                "{what}: median {:.0} µs, 99 % {:.0}, 99.9 % {:.0}, most {:.0}, of {}",
                at(500),
                at(990),
                at(999),
                at(1_000),
                times.len()
            );
        }
    }
}

/// The format that a request with this schema asks for, or the reason why it is refused.
fn format_of(schema: &Value) -> Result<AnswerFormat, String> {
    let body = json!({ "model": uuid::Uuid::nil(), "guided_json": schema,
        "messages": [{ "role": "user", "content": "hi" }] });
    let tree = JsonTree::parse(body.to_string().as_bytes()).map_err(|why| why.to_string())?;
    let request = ChatRequest::parse(&tree).map_err(|why| why.to_string())?;
    Ok(request.input.format.ok_or("no format")?.format)
}
