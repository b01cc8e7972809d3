//! The plans in force: what their accounts may do.

use super::layout;
use crate::Console;
use cresset_request::PlanInForce;
use maud::{Markup, html};
use std::fmt::Display;

const HEADS: [&str; 10] = [
    "Plan",
    "Requests a minute",
    "Burst",
    "At once",
    "Priority",
    "Context tokens",
    "Output tokens",
    "Tokens a day",
    "Tokens a month",
    "Models",
];

pub(super) fn table(live: &Console) -> Markup {
    let all: Vec<_> = live.node.plans.all().iter().map(|plan| row(plan)).collect();
    html! {
        (layout::table("Plans", &HEADS, &all))
        p { "Plans stand in the configuration; " code { "cresset reload" } " takes changes over." }
    }
}

fn row(PlanInForce { name, limits: plan, .. }: &PlanInForce) -> Vec<Markup> {
    let limit =
        |limit: Option<&dyn Display>| html! { (limit.map_or("–".into(), ToString::to_string)) };
    let fixed = |limit: &dyn Display| html! { (limit) };
    vec![
        html! { (name) },
        fixed(&plan.requests_per_minute),
        fixed(&plan.burst),
        fixed(&plan.max_concurrent),
        fixed(&plan.priority),
        limit(plan.context_tokens.as_ref().map(|n| n as _)),
        limit(plan.max_output_tokens.as_ref().map(|n| n as _)),
        limit(plan.tokens_per_day.as_ref().map(|n| n as _)),
        limit(plan.tokens_per_month.as_ref().map(|n| n as _)),
        html! { (plan.models.as_ref().map_or("all".into(), |models| models.join(", "))) },
    ]
}
