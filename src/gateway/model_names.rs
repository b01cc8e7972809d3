//! The names under which clients know models, from the node's own list. A model's name is its
//! address, or its release's label where it has no address.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// What Ollama's clients add to a name without a tag.
const LATEST: &str = ":latest";

/// The models that one credential can use.
#[derive(Debug, Default)]
pub(super) struct ModelNames(Vec<NamedModel>);

#[derive(Debug)]
struct NamedModel {
    id: String,
    address: Option<String>,
    label: String,
    thinks: bool,
    max_output: Option<u64>,
}

impl ModelNames {
    /// The names of the node's models, as it describes them.
    pub(super) fn of(models: &[Value]) -> Self {
        let named = models.iter().filter_map(|model| {
            Some(NamedModel {
                id: model["id"].as_str()?.to_owned(),
                address: model["address"].as_str().map(str::to_owned),
                label: model["release_label"].as_str()?.to_owned(),
                thinks: capabilities(model).any(|name| name == "reasoning"),
                max_output: model["limits"]["max_output_tokens"].as_u64(),
            })
        });
        Self(named.collect())
    }

    /// Whether the model with this id thinks, and the most output tokens that it gives.
    pub(super) fn facts(&self, id: &str) -> (bool, Option<u64>) {
        let found = self.0.iter().find(|model| model.id == id);
        found.map_or((false, None), |model| (model.thinks, model.max_output))
    }

    /// The name of the only model that there is.
    pub(super) fn only_name(&self) -> Option<&str> {
        let [only] = &self.0[..] else { return None };
        Some(only.name())
    }

    /// The id of the model that `name` means by itself or as one of the `aliases`. The longest
    /// alias counts, and those that end in `*` stand for every name that begins so.
    pub(super) fn id_with(&self, aliases: &BTreeMap<String, String>, name: &str) -> Option<&str> {
        let means = |alias: &str| match alias.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == alias,
        };
        let meant = || aliases.iter().filter(|(alias, _)| means(alias));
        let model = || meant().max_by_key(|(alias, _)| alias.len()).map(|(_, model)| model);
        self.id(name).or_else(|| self.id(model()?))
    }

    /// The id of the model that `name` means: the one with this address, or else the only one with
    /// this label, or the one with this id. Ollama's clients add `:latest` to a name.
    pub(super) fn id(&self, name: &str) -> Option<&str> {
        let by_address = self.only(|model| model.address.as_deref() == Some(name));
        let known = by_address.or_else(|| self.only(|model| model.label == name));
        let known = known.or_else(|| self.only(|model| model.id == name));
        known.or_else(|| self.id(name.strip_suffix(LATEST)?))
    }

    /// Puts names in place of ids, where a name means that model alone.
    pub(super) fn rename(&self, models: &mut [Value]) {
        for model in models {
            let name = model["address"].as_str().or(model["release_label"].as_str());
            let is_own = |name: &&str| self.id(name) == model["id"].as_str();
            if let Some(name) = name.filter(is_own).map(str::to_owned) {
                model["id"] = name.into();
            }
        }
    }

    fn only(&self, matches: impl Fn(&NamedModel) -> bool) -> Option<&str> {
        let mut found = self.0.iter().filter(|model| matches(model));
        let first = found.next()?;
        found.next().is_none().then_some(&first.id)
    }
}

/// What a model can do, as the node names it.
pub(super) fn capabilities(model: &Value) -> impl Iterator<Item = &str> {
    model["capabilities"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

impl NamedModel {
    fn name(&self) -> &str {
        self.address.as_ref().unwrap_or(&self.label)
    }
}

impl fmt::Display for ModelNames {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let names = self.0.iter().map(NamedModel::name);
        formatter.write_str(&names.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_name_means_one_model_or_none() {
        let model = |id: &str, address: Option<&str>, label: &str| json!({ "id": id, "address": address, "release_label": label });
        let mut models = [
            model("1", Some("small"), "Small, 8 bits"),
            model("2", None, "own"),
            model("3", None, "twin"),
            model("4", None, "twin"),
            model("5", None, "small"),
            json!({ "error": {} }),
        ];
        let names = ModelNames::of(&models);
        let check = |name: &str, expect: Option<&str>| assert_eq!(names.id(name), expect, "{name}");
        check("small", Some("1"));
        check("3", Some("3"));
        check("Small, 8 bits", Some("1"));
        check("own", Some("2"));
        check("twin", None);
        check("SMALL", None);
        check("small:latest", Some("1"));
        check("twin:latest", None);
        check(":latest", None);
        let aliases = [("claude-*", "own"), ("claude-3*", "small"), ("gpt-4", "small"), ("x", "y")];
        let aliases = aliases.map(|(alias, model)| (alias.to_owned(), model.to_owned())).into();
        let check = |name: &str, expect: Option<&str>| {
            assert_eq!(names.id_with(&aliases, name), expect, "{name}");
        };
        check("claude-sonnet-4", Some("2"));
        check("claude-3-haiku", Some("1"));
        check("gpt-4", Some("1"));
        check("gpt-4o", None);
        check("x", None);
        check("own", Some("2"));
        assert_eq!(names.only_name(), None);
        for (model, expect) in [(1, "own"), (0, "small")] {
            assert_eq!(ModelNames::of(&models[model..=model]).only_name(), Some(expect));
        }
        names.rename(&mut models[..5]);
        let ids = models[..5].iter().map(|model| &model["id"]);
        assert!(ids.eq(["small", "own", "3", "4", "5"]));
    }
}
