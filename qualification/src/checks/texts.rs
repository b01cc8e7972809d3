//! Texts of this project's own, free of any terms (CC0): what an ordinary model has learned to
//! read.

use crate::policy::{LanguageBounds, Threshold};

pub(crate) struct OwnText {
    pub name: &'static str,
    pub text: &'static str,
    /// The loss of a model of average strength with 1e8 parameters, nat per token.
    pub average: fn(&LanguageBounds) -> &Threshold,
}

pub(crate) const PLAIN_TEXTS: &[OwnText] = &[
    OwnText {
        name: "prose",
        text: include_str!("../../texts/prose.md"),
        average: |bounds| &bounds.prose,
    },
    OwnText {
        name: "code",
        text: include_str!("../../texts/code.md"),
        average: |bounds| &bounds.code,
    },
    OwnText {
        name: "German",
        text: include_str!("../../texts/german.md"),
        average: |bounds| &bounds.german,
    },
    OwnText {
        name: "dialogue",
        text: include_str!("../../texts/dialogue.md"),
        average: |bounds| &bounds.dialogue,
    },
    OwnText {
        name: "table",
        text: include_str!("../../texts/table.md"),
        average: |bounds| &bounds.table,
    },
    OwnText {
        name: "maths",
        text: include_str!("../../texts/maths.md"),
        average: |bounds| &bounds.maths,
    },
];
