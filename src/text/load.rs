//! Loads a release's textual side from its files: tokenizer, template, and the ids that end a
//! generation.

use super::forms::channels::{CALLED, END, RETURNED};
use super::forms::fill_in::{self, FillInTokens};
use super::forms::reasoning::{CHANNEL_THOUGHT, ThinkingMarks};
use super::gguf::GgufKeys;
use super::settings::FormatSettings;
use super::{ChatMessage, ChatTemplate, Error, Result, TemplateLimits, TextModel, Tokenizer};
use cresset_models::loader::gguf::GgufFile;
use cresset_models::{FileLayout, ModelSource};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// With this token Gemma 4 begins what a tool answered, which is for others to write. Its GGUF
/// files do not name it among the ends of answers.
const YIELD: &str = "<|tool_response>";

impl TextModel {
    /// Loads from the release's files (GGUF metadata, or tokenizer.json + tokenizer_config.json +
    /// generation_config.json).
    pub fn load(source: &ModelSource) -> Result<Self> {
        Self::load_within(source, TemplateLimits::default())
    }

    /// Loads as `load` does; each rendering of the template ends at `limits`.
    pub fn load_within(source: &ModelSource, limits: TemplateLimits) -> Result<Self> {
        match source.layout() {
            FileLayout::Gguf(path) => {
                let file = GgufFile::open(path).map_err(unreadable)?;
                let model = Self::from_gguf_metadata(GgufKeys(&file.metadata), limits)?;
                Ok(Self { header_blake3: Some(file.header_blake3), ..model })
            }
            FileLayout::HfFolder(folder) => Self::from_hf_folder(source, folder, limits),
        }
    }

    pub(super) fn from_gguf_metadata(keys: GgufKeys<'_>, limits: TemplateLimits) -> Result<Self> {
        let tokens = keys.tokens()?;
        let token = |key: &str| {
            keys.id(key).and_then(|id| tokens.get(id as usize)).copied().unwrap_or_default()
        };
        let source = keys
            .string("tokenizer.chat_template")
            .ok_or_else(|| no_template("tokenizer.chat_template in the GGUF file"))?;
        let special = ["bos", "eos"].map(|kind| token(&format!("tokenizer.ggml.{kind}_token_id")));
        let ends = ["eos", "eot", "eom"].map(|kind| keys.token(kind));
        let tokenizer = Tokenizer::new(super::gguf::tokenizer(keys)?)?;
        let declared = ends.into_iter().flatten();
        let mut model = Self::assemble(tokenizer, source, special, limits, declared)?;
        model.bos_id = keys.token("bos").filter(|_| keys.adds_bos());
        model.fill_in = model.fill_in.or_else(|| keys.fill_in());
        Ok(model)
    }

    fn from_hf_folder(files: &ModelSource, folder: &Path, limits: TemplateLimits) -> Result<Self> {
        let tokenizer = files.read_needed("tokenizer.json").map_err(unreadable)?;
        let tokenizer = Tokenizer::from_tokenizer_json(&tokenizer)?;
        let path = folder.join("tokenizer_config.json");
        let config = files.read_needed("tokenizer_config.json").map_err(unreadable)?;
        let config = json(&path, &config)?;
        let source = template_in(files, folder, &config)?;
        let (bos, eos) = (token_in(&config["bos_token"]), token_in(&config["eos_token"]));
        let mut ends: Vec<u32> = tokenizer.token_to_id(eos).into_iter().collect();
        for file in ["generation_config.json", "config.json"] {
            if let Some(text) = files.read(file).map_err(unreadable)? {
                ends.extend(ids_in(&json(&folder.join(file), &text)?["eos_token_id"]));
            }
        }
        // Without a switch the tokenizer's own last step says so.
        let adds_bos = config["add_bos_token"].as_bool();
        let bos_id = tokenizer.token_to_id(bos);
        let begins = bos_id.filter(|id| adds_bos.unwrap_or_else(|| tokenizer.begins_with(*id)));
        let model = Self::assemble(tokenizer, &source, [bos, eos], limits, ends.into_iter())?;
        Ok(Self { bos_id: begins, ..model })
    }

    fn assemble(
        tokenizer: Tokenizer,
        source: &str,
        [bos, eos]: [&str; 2],
        limits: TemplateLimits,
        declared: impl Iterator<Item = u32>,
    ) -> Result<Self> {
        let template = ChatTemplate::new(source, bos, eos, limits)?;
        let thinking = ThinkingMarks::named_in(source);
        let mut eos_ids: BTreeSet<u32> =
            declared.chain(end_of_turn(&tokenizer, &template)).collect();
        if thinking == Some(CHANNEL_THOUGHT) {
            correct_ends(&tokenizer, &mut eos_ids);
        }
        eos_ids.extend(tokenizer.token_to_id(YIELD));
        if eos_ids.is_empty() {
            return Err(Error::BadFile(
                "neither generation config, tokenizer nor chat template names a token that ends an answer; use the release's own files".into(),
            ));
        }
        let prompts = sample_prompts(&template);
        let mut written = vec![source, bos, eos];
        written.extend(prompts.iter().map(String::as_str));
        let markup = tokenizer.markup(&written);
        let is_written = |text: &str| written.iter().any(|written| written.contains(text));
        let written = markup.iter().filter(|token| is_written(&token.text));
        let markup_ids: BTreeSet<u32> =
            written.map(|token| token.id).chain(eos_ids.iter().copied()).collect();
        let calls = super::call_family::call_form(&template, &markup);
        let raw_eos_ids: BTreeSet<u32> =
            eos_ids.iter().copied().chain(fill_in::ends(&tokenizer)).collect();
        Ok(Self {
            fill_in: FillInTokens::of(&tokenizer),
            bos_id: None,
            raw_eos_ids: raw_eos_ids.into_iter().collect(),
            tokenizer,
            template,
            thinking,
            calls,
            markup,
            markup_ids: markup_ids.into_iter().collect(),
            eos_ids: eos_ids.into_iter().collect(),
            header_blake3: None,
            formats: FormatSettings::default(),
            grammars: std::sync::OnceLock::new(),
        })
    }
}

fn no_template(place: &str) -> Error {
    Error::BadFile(format!(
        "there is no chat template ({place}); only chat models can be served: use the instruction-tuned release"
    ))
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: Some(content.into()), ..ChatMessage::default() }
}

/// Conversations as the template writes them: it may put tokens together from pieces, such as
/// `'<|' + message.role + '|>'`.
fn sample_prompts(template: &ChatTemplate) -> Vec<String> {
    let conversations = [
        &["user"][..],
        &["system", "user"],
        &["user", "assistant", "user"],
        &["user", "assistant", "tool"],
    ];
    let prompt = |roles: &&[&str]| {
        let messages: Vec<ChatMessage> = roles.iter().map(|role| message(role, "0")).collect();
        template.render(&messages, true).ok()
    };
    conversations.iter().filter_map(prompt).collect()
}

/// The special token that the template puts after an assistant's answer.
fn end_of_turn(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<u32> {
    const ANSWER: &str = "answer0";
    let prompt = template
        .render(&[message("user", "question0"), message("assistant", ANSWER)], false)
        .ok()?;
    let (_, behind) = prompt.rsplit_once(ANSWER)?;
    Some(tokenizer.specials().at_start_of(behind.trim_start())?.id)
}

/// The ends of an answer in channels: the end of one of its messages is none.
fn correct_ends(tokenizer: &Tokenizer, ends: &mut BTreeSet<u32>) {
    ends.extend([CALLED, RETURNED].into_iter().filter_map(|mark| tokenizer.token_to_id(mark)));
    if let Some(end) = tokenizer.token_to_id(END) {
        ends.remove(&end);
    }
}

/// The error names the file.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes it by value")]
fn unreadable(error: cresset_models::Error) -> Error {
    Error::BadFile(error.to_string())
}

fn json(path: &Path, text: &[u8]) -> Result<Value> {
    serde_json::from_slice(text)
        .map_err(|error| Error::BadFile(format!("{} is no JSON: {error}", path.display())))
}

/// The template in a file of its own, else the one in the config: a string, or the entry named
/// `default` of a list.
fn template_in(files: &ModelSource, folder: &Path, config: &Value) -> Result<String> {
    const OWN_FILE: &str = "chat_template.jinja";
    if let Some(text) = files.read(OWN_FILE).map_err(unreadable)? {
        return String::from_utf8(text).map_err(|error| {
            let path = folder.join(OWN_FILE);
            Error::BadFile(format!("{} is no UTF-8: {error}", path.display()))
        });
    }
    let template = &config["chat_template"];
    let default = || {
        template.as_array()?.iter().find(|entry| entry["name"] == "default")?["template"].as_str()
    };
    let inline = template.as_str().or_else(default);
    let place = "chat_template.jinja, or chat_template in tokenizer_config.json";
    inline.map(str::to_owned).ok_or_else(|| no_template(place))
}

/// A token is a string, or an object with its `content`.
fn token_in(value: &Value) -> &str {
    value.as_str().or_else(|| value["content"].as_str()).unwrap_or_default()
}

/// One id, or a list of them.
fn ids_in(value: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    value
        .as_array()
        .map_or_else(|| id(value).into_iter().collect(), |ids| ids.iter().filter_map(id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RawPrompt, testing};
    use cresset_models::loader::gguf::Value as Gguf;

    #[test]
    fn ends_of_generation_are_the_union_of_all_sources() {
        let check = |change: &[(&str, Gguf)], expect: &[u32]| {
            let mut metadata = testing::byte_level();
            metadata.extend(change.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
            assert_eq!(testing::text_model(&metadata).eos_ids, expect, "{change:?}");
        };
        let template = |source: &str| ("tokenizer.chat_template", Gguf::String(source.into()));
        check(&[], &[0, 2]);
        check(&[("tokenizer.ggml.eos_token_id", Gguf::U32(2))], &[2]);
        check(&[("tokenizer.ggml.eot_token_id", Gguf::U32(7))], &[0, 2, 7]);
        check(&[("tokenizer.ggml.eom_token_id", Gguf::U64(9))], &[0, 2, 9]);
        check(
            &[template("{% for m in messages %}{{ m.content }}\n{{ eos_token }}{% endfor %}")],
            &[0],
        );
        check(&[template("{% for m in messages %}{{ m.content }} no token {% endfor %}")], &[0]);
        check(&[template("{{ raise_exception('never') }}")], &[0]);
        let yields = testing::text_model(&testing::with_marks(&[YIELD], testing::CHATML));
        let id = yields.tokenizer.token_to_id(YIELD).unwrap();
        assert_eq!(yields.eos_ids, [0, 2, id]);
    }

    #[test]
    fn a_release_without_template_or_end_is_refused() {
        let check = |change: &dyn Fn(&mut testing::Metadata), expect: &str| {
            let mut metadata = testing::byte_level();
            change(&mut metadata);
            let Err(error) =
                TextModel::from_gguf_metadata(GgufKeys(&metadata), TemplateLimits::default())
            else {
                panic!("{expect}: accepted")
            };
            assert!(error.to_string().contains(expect), "{error}");
        };
        check(&|metadata| drop(metadata.remove("tokenizer.chat_template")), "no chat template");
        let endless = |metadata: &mut testing::Metadata| {
            metadata.remove("tokenizer.ggml.eos_token_id");
            metadata.insert(
                "tokenizer.chat_template".into(),
                Gguf::String("{{ messages[0].content }}".into()),
            );
        };
        check(&endless, "names a token that ends an answer");
    }

    const TOKENIZER: &str = r#"{
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
            {"id": 1, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "n": 4}, "merges": []}
    }"#;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn folders_in_hugging_face_layout() {
        let check = |files: &[(&str, &str)], prompt: &[u32], eos: &[u32]| {
            let files = [files, &[("tokenizer.json", TOKENIZER)]].concat();
            let model =
                TextModel::load(&ModelSource::hf_folder(folder(&files).path().into())).unwrap();
            assert_eq!(model.encode_chat(&[message("user", "ab")]).unwrap(), prompt, "{files:?}");
            assert_eq!(model.eos_ids, eos, "{files:?}");
        };
        let template = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}"#;
        check(&[("tokenizer_config.json", template)], &[0, 2, 3], &[1]);
        check(
            &[
                ("tokenizer_config.json", template),
                ("generation_config.json", r#"{"eos_token_id": [3, 1]}"#),
            ],
            &[0, 2, 3],
            &[1, 3],
        );
        check(
            &[("tokenizer_config.json", template), ("config.json", r#"{"eos_token_id": 4}"#)],
            &[0, 2, 3],
            &[1, 4],
        );
        check(
            &[
                ("tokenizer_config.json", template),
                ("chat_template.jinja", "{{ messages[0].content }}n\n"),
            ],
            &[2, 3, 4],
            &[1],
        );
        let list = r#"{"eos_token": "</s>", "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages[0].content }}"}]}"#;
        check(&[("tokenizer_config.json", list)], &[2, 3], &[1]);
    }

    #[test]
    fn a_folder_says_whether_texts_have_a_beginning() {
        const LAST_STEP: &str = r#"{"post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},"#;
        let adding = TOKENIZER.replacen('{', LAST_STEP, 1);
        let raw = RawPrompt::Text { text: "ab".into(), add_special: true, parse_special: true };
        for (tokenizer, switch, expect) in [
            (TOKENIZER, "", &[2, 3][..]),
            (TOKENIZER, r#""add_bos_token": true,"#, &[0, 2, 3]),
            (&adding, "", &[0, 2, 3]),
            (&adding, r#""add_bos_token": false,"#, &[2, 3]),
        ] {
            let config = format!(
                r#"{{{switch} "bos_token": "<s>", "eos_token": "</s>", "chat_template": "x"}}"#
            );
            let files = [("tokenizer.json", tokenizer), ("tokenizer_config.json", &config)];
            let model = TextModel::load(&ModelSource::hf_folder(folder(&files).path().into()));
            assert_eq!(model.unwrap().encode_raw(&raw).unwrap(), expect, "{switch}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let folder = folder(&[("tokenizer.json", TOKENIZER)]);
        let Err(error) = TextModel::load(&ModelSource::hf_folder(folder.path().into())) else {
            panic!("accepted")
        };
        assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
    }
}
