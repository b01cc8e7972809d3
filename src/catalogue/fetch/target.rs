//! A repository on the hub as users name it.

use crate::{Manifest, Source};

/// Hosts of the public hub, as they stand in addresses that users copy.
const HOSTS: [&str; 3] = ["huggingface.co/", "www.huggingface.co/", "hf.co/"];
/// The parts of the hub's own addresses that come between a repository and a revision.
const VIEWS: [&str; 3] = ["resolve", "blob", "tree"];

/// `OWNER/REPOSITORY[/FILE.gguf | :QUANTISATION][@REVISION]`, or the address of its page or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct HubTarget {
    pub repo: String,
    pub file: Option<String>,
    /// Stands for the one GGUF file whose name ends with it, such as `Q4_K_M`.
    pub quantisation: Option<String>,
    pub revision: String,
}

impl HubTarget {
    /// Whether a release was pulled from here. A version that is not named is any.
    pub(crate) fn gave(&self, manifest: &Manifest) -> bool {
        let asked = |path: &String| match (&self.file, &self.quantisation) {
            (Some(file), _) => path == file,
            (None, Some(tag)) => {
                let stem = path.strip_suffix(".gguf").unwrap_or(path).to_ascii_lowercase();
                stem.ends_with(&tag.to_ascii_lowercase())
            }
            (None, None) => true,
        };
        manifest.sources.iter().any(|source| match source {
            Source::Hub { repo, revision, files } => {
                *repo == self.repo
                    && (self.revision == "main" || *revision == self.revision)
                    && files.values().any(asked)
            }
            _ => false,
        })
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let path = without_host(text)?;
        let path = path.split(['?', '#']).next()?.trim_end_matches('/');
        let (path, revision) = path.split_once('@').unwrap_or((path, "main"));
        let (path, quantisation) = match path.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (path, None),
        };
        let mut parts = path.splitn(3, '/');
        let (owner, repository, rest) = (parts.next()?, parts.next()?, parts.next());
        let (file, revision) = match rest.and_then(viewed) {
            Some((revision, file)) => (file, revision),
            None => (rest, revision),
        };
        let tag_fits =
            quantisation.is_none_or(is_word) && (quantisation.is_none() || file.is_none());
        let valid = is_word(owner) && is_word(repository) && tag_fits;
        let valid = valid && file.is_none_or(is_safe_path) && is_safe_path(revision);
        valid.then(|| Self {
            repo: format!("{owner}/{repository}"),
            file: file.map(str::to_owned),
            quantisation: quantisation.filter(|tag| *tag != "latest").map(str::to_owned),
            revision: revision.to_owned(),
        })
    }
}

/// What a user should write in place of a name that another program would understand.
pub(in super::super) fn spelling(text: &str) -> Option<String> {
    if text.contains("://") || HOSTS.iter().any(|host| text.starts_with(host)) {
        return Some(
            "only addresses of a repository or file on huggingface.co are understood: write \
             OWNER/REPOSITORY[/FILE.gguf][@REVISION], and set hub.endpoint for another hub"
                .into(),
        );
    }
    let (name, tag) = text.split_once(':')?;
    Some(format!(
        "{text:?} is a name of Ollama's library, which this node does not use: find the model on \
         the hub and write OWNER/REPOSITORY:QUANTISATION, such as OWNER/{name}-GGUF:Q4_K_M in \
         place of {name}:{tag}"
    ))
}

/// The text without scheme and host; `None` if it names another host.
fn without_host(text: &str) -> Option<&str> {
    let bare = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let named = bare.unwrap_or(text);
    match HOSTS.iter().find_map(|host| named.strip_prefix(host)) {
        Some(path) => Some(path),
        None if bare.is_some() => None,
        None => Some(text),
    }
}

/// Revision and file of an address such as `resolve/main/FILE`.
fn viewed(rest: &str) -> Option<(&str, Option<&str>)> {
    let (view, rest) = rest.split_once('/')?;
    VIEWS.contains(&view).then_some(())?;
    Some(rest.split_once('/').map_or((rest, None), |(revision, file)| (revision, Some(file))))
}

/// Whether a text can be one part of a path and of an address: neither hidden nor a way up.
pub(super) fn is_word(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    !text.is_empty() && text.len() <= 128 && !text.starts_with('.') && text.bytes().all(allowed)
}

/// Whether a text can be a path inside a repository, and a part of an address as it stands.
pub(super) fn is_safe_path(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-._+()=,~".contains(&c);
    let is_name =
        |name: &str| !name.is_empty() && !name.starts_with('.') && name.bytes().all(allowed);
    text.len() <= 255 && text.split('/').all(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_repository_is_understood() {
        let check = |text: &str, expect: Option<(&str, Option<&str>, Option<&str>, &str)>| {
            let found = HubTarget::parse(text);
            let found = found.as_ref().map(|t| {
                (t.repo.as_str(), t.file.as_deref(), t.quantisation.as_deref(), t.revision.as_str())
            });
            assert_eq!(found, expect, "{text}");
        };
        check("o/r", Some(("o/r", None, None, "main")));
        check("o/r@v1", Some(("o/r", None, None, "v1")));
        check("o/r/a/b.gguf@refs/pr/1", Some(("o/r", Some("a/b.gguf"), None, "refs/pr/1")));
        check("o/r:Q4_K_M", Some(("o/r", None, Some("Q4_K_M"), "main")));
        check("hf.co/o/r:Q4_K_M@v1", Some(("o/r", None, Some("Q4_K_M"), "v1")));
        check("hf.co/o/r:latest", Some(("o/r", None, None, "main")));
        check("https://huggingface.co/o/r/", Some(("o/r", None, None, "main")));
        check("https://hf.co/o/r/tree/v2", Some(("o/r", None, None, "v2")));
        check(
            "https://huggingface.co/o/r/blob/main/w.gguf",
            Some(("o/r", Some("w.gguf"), None, "main")),
        );
        check(
            "https://huggingface.co/o/r/resolve/abc/a/w.gguf?download=true",
            Some(("o/r", Some("a/w.gguf"), None, "abc")),
        );
        for text in [
            "name",
            "owner/",
            "owner/repo@",
            "../repo?x",
            "o/..",
            "../r",
            "o/r/../x",
            "o/r//x",
            "o/r/.x",
            "o/r:",
            "o/r:a/b",
            "o/r@..",
            "o/r@../x",
            "o/r/a%2fb",
            "o/r/a\\b",
            "o/r/a\0b",
            "https://example.com/o/r",
            "ftp://hf.co/o/r",
            "llama3.2:3b",
        ] {
            check(text, None);
        }
        check(&format!("o/{}", "r".repeat(129)), None);
    }

    #[test]
    fn names_of_other_programs_get_the_right_spelling() {
        let hint = |text: &str| spelling(text).unwrap_or_default();
        assert!(hint("llama3.2:3b").contains("OWNER/llama3.2-GGUF:Q4_K_M"));
        assert!(hint("https://example.com/o/r").contains("hub.endpoint"));
        assert!(hint("hf.co/justone").contains("OWNER/REPOSITORY"));
        assert_eq!(spelling("gpt"), None);
    }
}
