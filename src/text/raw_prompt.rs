//! Prompts without a chat template: a bare text, token ids, or a text with a gap. Such a prompt is
//! its caller's own, so the text of a special token becomes that token where the caller wants it.

use super::forms::fill_in::FillInTokens;
use super::{Error, Result, TextModel};

/// What a model is given in place of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawPrompt {
    Text {
        text: String,
        /// The token that begins every text goes before it, where the release has one.
        add_special: bool,
        /// The text of special tokens becomes these tokens.
        parse_special: bool,
    },
    Tokens(Vec<u32>),
    /// The text between two others. None of them becomes a special token.
    FillIn {
        prefix: String,
        suffix: String,
        /// Further files of the project.
        files: Vec<ProjectFile>,
    },
}

/// A file beside the one with the gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProjectFile {
    pub name: String,
    pub text: String,
}

/// What stands for the names of the project and of the file with the gap, which are not told.
const PROJECT: &str = "project\n";
const FILE: &str = "file\n";

impl TextModel {
    /// Whether the vocabulary has tokens that ask for the text between two others.
    pub fn fills_in(&self) -> bool {
        self.fill_in.is_some()
    }

    /// Token ids of a raw prompt. Those that the caller sent are not checked.
    pub fn encode_raw(&self, prompt: &RawPrompt) -> Result<Vec<u32>> {
        match prompt {
            RawPrompt::Tokens(ids) => Ok(ids.clone()),
            RawPrompt::Text { text, add_special, parse_special } => {
                let mut ids = self.tokenizer.encode(text, *parse_special)?;
                let bos = self.bos_id.filter(|bos| *add_special && ids.first() != Some(bos));
                ids.splice(0..0, bos);
                Ok(ids)
            }
            RawPrompt::FillIn { prefix, suffix, files } => {
                let why = || Error::Internal("the vocabulary has no tokens to fill in".into());
                self.encode_gap(&self.fill_in.ok_or_else(why)?, [prefix, suffix], files)
            }
        }
    }

    fn encode_gap(
        &self,
        tokens: &FillInTokens,
        [prefix, suffix]: [&str; 2],
        files: &[ProjectFile],
    ) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> = self.bos_id.into_iter().collect();
        self.add_files(tokens, files, &mut ids)?;
        let mut parts = [(tokens.prefix, prefix), (tokens.suffix, suffix)];
        if tokens.suffix_first {
            parts.reverse();
        }
        for (mark, text) in parts {
            ids.push(mark);
            ids.extend(self.tokenizer.encode_piece(text, false)?);
        }
        ids.extend(tokens.middle);
        Ok(ids)
    }

    /// Files stand before the gap, each behind its name. A family that was trained with projects
    /// has tokens that divide them.
    fn add_files(
        &self,
        tokens: &FillInTokens,
        files: &[ProjectFile],
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        let mut add = |mark: Option<u32>, text: &str| -> Result<()> {
            ids.extend(mark);
            ids.extend(self.tokenizer.encode_piece(text, false)?);
            Ok(())
        };
        let [project, file] = tokens.project.map_or([None; 2], |marks| marks.map(Some));
        if project.is_some() && !files.is_empty() {
            add(project, PROJECT)?;
        }
        for ProjectFile { name, text } in files {
            let end = if text.ends_with('\n') { "" } else { "\n" };
            add(file, &format!("{name}\n{text}{end}"))?;
        }
        if file.is_some() && !files.is_empty() {
            add(file, FILE)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, Metadata};
    use cresset_models::loader::gguf::Value;

    fn text(text: &str, add_special: bool, parse_special: bool) -> RawPrompt {
        RawPrompt::Text { text: text.into(), add_special, parse_special }
    }

    fn gap(files: &[[&str; 2]]) -> RawPrompt {
        let file = |[name, text]: &[&str; 2]| ProjectFile {
            name: (*name).to_owned(),
            text: (*text).to_owned(),
        };
        RawPrompt::FillIn {
            prefix: "he".into(),
            suffix: "wo".into(),
            files: files.iter().map(file).collect(),
        }
    }

    /// The prompt with the texts of its special tokens.
    fn shown(metadata: &Metadata, prompt: &RawPrompt) -> String {
        let model = testing::text_model(metadata);
        model.tokenizer.decode(&model.encode_raw(prompt).unwrap(), false).unwrap()
    }

    #[test]
    fn a_text_is_encoded_as_it_is() {
        let plain = testing::byte_level();
        let with = |adds: bool| {
            let mut metadata = testing::byte_level();
            metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(adds));
            metadata
        };
        for (metadata, prompt, expect) in [
            (&plain, text("hello <|im_end|>", true, true), "hello <|im_end|>"),
            (&with(true), text("hello", true, true), "<|im_start|>hello"),
            (&with(true), text("hello", false, true), "hello"),
            (&with(true), text("<|im_start|>hello", true, true), "<|im_start|>hello"),
            (&with(false), text("hello", true, true), "hello"),
            (&with(true), RawPrompt::Tokens(vec![2, 107]), "<|im_end|>h"),
        ] {
            assert_eq!(shown(metadata, &prompt), expect, "{prompt:?}");
        }
        let model = testing::text_model(&plain);
        let tokens = |parse| model.encode_raw(&text("<|im_end|>", true, parse)).unwrap();
        assert_eq!(tokens(true), [2]);
        assert!(tokens(false).len() > 1 && !tokens(false).contains(&2));
    }

    #[test]
    fn old_files_do_not_say_whether_texts_have_a_beginning() {
        for (pre, expect) in [("llama-bpe", true), ("smollm", false)] {
            let mut metadata = testing::byte_level();
            metadata.insert("tokenizer.ggml.pre".into(), Value::String(pre.into()));
            let model = testing::text_model(&metadata);
            assert_eq!(model.bos_id.is_some(), expect, "{pre}");
        }
    }

    #[test]
    fn a_gap_is_written_as_the_family_writes_it() {
        let qwen = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
        let project = [&qwen[..], &["<|repo_name|>", "<|file_sep|>"]].concat();
        let seed = ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"];
        for (marks, files, expect) in [
            (&qwen[..], &[][..], "<|fim_prefix|>he<|fim_suffix|>wo<|fim_middle|>"),
            (&qwen, &[["a.rs", "1"]], "a.rs\n1\n<|fim_prefix|>he<|fim_suffix|>wo<|fim_middle|>"),
            (&project, &[], "<|fim_prefix|>he<|fim_suffix|>wo<|fim_middle|>"),
            (
                &project,
                &[["a.rs", "1\n"], ["b.rs", "2"]],
                "<|repo_name|>project\n<|file_sep|>a.rs\n1\n<|file_sep|>b.rs\n2\n<|file_sep|>file\n\
                 <|fim_prefix|>he<|fim_suffix|>wo<|fim_middle|>",
            ),
            (
                &["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
                &[],
                "<fim_prefix>he<fim_suffix>wo<fim_middle>",
            ),
            (
                &["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
                &[],
                "<｜fim▁begin｜>he<｜fim▁hole｜>wo<｜fim▁end｜>",
            ),
            (&seed, &[], "<[fim-suffix]>wo<[fim-prefix]>he<[fim-middle]>"),
            (&["[PREFIX]", "[SUFFIX]"], &[], "[SUFFIX]wo[PREFIX]he"),
        ] {
            let metadata = testing::with_marks(marks, testing::CHATML);
            assert_eq!(shown(&metadata, &gap(files)), expect);
        }
        for incomplete in [&qwen[..2], &["[PREFIX]"], &[]] {
            let metadata = testing::with_marks(incomplete, testing::CHATML);
            assert!(!testing::text_model(&metadata).fills_in(), "{incomplete:?}");
        }
    }

    #[test]
    fn a_file_may_name_its_own_tokens() {
        for names in [["fim_pre", "fim_suf", "fim_mid"], ["prefix", "suffix", "middle"]] {
            let mut metadata = testing::with_marks(&["{a}", "{b}", "{c}"], testing::CHATML);
            let first = testing::text_model(&metadata).tokenizer.token_to_id("{a}").unwrap();
            for (name, id) in names.iter().zip(first..) {
                let key = format!("tokenizer.ggml.{name}_token_id");
                metadata.insert(key, Value::U32(id));
            }
            assert_eq!(shown(&metadata, &gap(&[])), "{a}he{b}wo{c}", "{names:?}");
            metadata.insert(format!("tokenizer.ggml.{}_token_id", names[0]), Value::U32(5_000));
            assert!(!testing::text_model(&metadata).fills_in(), "no such token: {names:?}");
        }
    }

    #[test]
    fn bare_texts_end_where_chats_end_and_where_files_do() {
        let marks = ["<|fim_pad|>", "<|file_sep|>", "<|other|>"];
        let model = testing::text_model(&testing::with_marks(&marks, testing::CHATML));
        let id = |mark: &str| model.tokenizer.token_to_id(mark).unwrap();
        assert_eq!(model.eos_ids, [0, 2]);
        assert_eq!(model.raw_eos_ids, [0, 2, id("<|fim_pad|>"), id("<|file_sep|>")]);
    }
}
