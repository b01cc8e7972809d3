//! The names under which clients know models, from the node's own list. A model's name is its
//! address, or its release's label where it has no address.

use serde_json::Value;
use std::fmt;

/// The models that one credential can use.
#[derive(Debug, Default)]
pub(super) struct ModelNames(Vec<NamedModel>);

#[derive(Debug)]
struct NamedModel {
    id: String,
    address: Option<String>,
    label: String,
}

impl ModelNames {
    /// Adds the models of a page; `None` if it is no page of models.
    pub(super) fn add_page(&mut self, page: &Value) -> Option<()> {
        for model in page["data"].as_array()? {
            self.0.push(NamedModel {
                id: model["id"].as_str()?.to_owned(),
                address: model["address"].as_str().map(str::to_owned),
                label: model["release_label"].as_str()?.to_owned(),
            });
        }
        Some(())
    }

    /// The id of the model that `name` means: the one with this address, or else the only one with
    /// this label.
    pub(super) fn id(&self, name: &str) -> Option<&str> {
        let by_address = self.only(|model| model.address.as_deref() == Some(name));
        by_address.or_else(|| self.only(|model| model.label == name))
    }

    /// Puts names in place of the ids of a page, where a name means that model alone.
    pub(super) fn rename(&self, page: &mut Value) {
        for model in page["data"].as_array_mut().into_iter().flatten() {
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

impl fmt::Display for ModelNames {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let names = self.0.iter().map(|model| model.address.as_ref().unwrap_or(&model.label));
        formatter.write_str(&names.map(String::as_str).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_name_means_one_model_or_none() {
        let model = |id: &str, address: Option<&str>, label: &str| json!({ "id": id, "address": address, "release_label": label });
        let mut page = json!({ "data": [
            model("1", Some("small"), "Small, 8 bits"),
            model("2", None, "own"),
            model("3", None, "twin"),
            model("4", None, "twin"),
            model("5", None, "small"),
        ] });
        let mut names = ModelNames::default();
        names.add_page(&page).unwrap();
        let check = |name: &str, expect: Option<&str>| assert_eq!(names.id(name), expect, "{name}");
        check("small", Some("1"));
        check("Small, 8 bits", Some("1"));
        check("own", Some("2"));
        check("twin", None);
        check("SMALL", None);
        names.rename(&mut page);
        let ids: Vec<_> = page["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
        assert_eq!(ids, ["small", "own", "3", "4", "5"]);
        assert!(names.add_page(&json!({ "error": {} })).is_none());
    }
}
