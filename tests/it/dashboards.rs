//! The board and the alerts that `cresset metrics dashboards` writes, held against the metrics of a
//! node that has served.

use super::process::{Folder, request};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const README: &str = include_str!("../../README.md");
/// Labels that the monitoring system adds, or that a histogram has.
const ADDED: [&str; 3] = ["instance", "job", "le"];

/// Each sample's name with the names of its labels.
fn told(metrics: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut told = BTreeMap::<_, BTreeSet<_>>::new();
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (sample, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        let labels = labels.trim_end_matches('}').split("\",").filter_map(|l| l.split_once('='));
        told.entry(name.to_owned()).or_default().extend(labels.map(|(label, _)| label.to_owned()));
    }
    told
}

/// The words of an expression, each with whether it names a metric.
fn words(expression: &str) -> impl Iterator<Item = &str> {
    expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
}

/// The labels by which an expression groups, and those that it selects by.
fn labels(expression: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (before, after) in [("by (", ')'), ("{", '}')] {
        for part in expression.split(before).skip(1) {
            let part = part.split(after).next().unwrap();
            let names = part.split(',').map(|name| name.split(['=', '!']).next().unwrap().trim());
            found.extend(names);
        }
    }
    found
}

/// Says what is wrong with an expression.
fn wrong(expression: &str, told: &BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    let is_metric = |word: &&str| word.starts_with("cresset_") || word.starts_with("process_");
    let metrics: Vec<_> = words(expression).filter(is_metric).collect();
    let known: BTreeSet<_> =
        metrics.iter().filter_map(|name| told.get(*name)).flatten().map(String::as_str).collect();
    let count = |c| expression.matches(c).count();
    if count('(') != count(')') || count('{') != count('}') || metrics.is_empty() {
        return Some(format!("{expression} is no expression"));
    }
    let strange = metrics.iter().find(|name| !told.contains_key(**name)).copied();
    let strange = strange.or(labels(expression)
        .into_iter()
        .find(|label| !known.contains(label) && !ADDED.contains(label)));
    strange.map(|name| format!("{expression}: the node tells no {name}"))
}

/// Every `expr` in a document.
fn expressions(document: &Value, found: &mut Vec<String>) {
    match document {
        Value::Object(members) => {
            for (name, value) in members {
                match value.as_str().filter(|_| name == "expr") {
                    Some(text) => found.push(text.to_owned()),
                    None => expressions(value, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, found)),
        _ => {}
    }
}

#[test]
fn boards_and_alerts_name_what_a_node_tells() {
    let folder = Folder::ready();
    let customer = folder.customer(1_000_000);
    let node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let body = json!({ "model": "tiny", "max_tokens": 3,
                       "messages": [{ "role": "user", "content": "hi" }] });
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {}\r\n\
         Content-Type: application/json\r\n",
        customer.key
    );
    let status = folder.json(&["status"]);
    let gateway = status["gateway"].as_str().unwrap();
    assert_eq!(request(gateway, &head, &body.to_string()).finish().status, 200);
    let metrics = request(&node.operator, "GET /metrics HTTP/1.1\r\n", "").finish().body;
    let mut told = told(&metrics);
    // What has not happened on this node is not told yet; README names every metric.
    for (name, label) in [
        ("cresset_engine_failures_total", "kind"),
        ("cresset_model_failures_total", "kind"),
        ("cresset_ledger_releases_total", "cause"),
        ("cresset_budget_alerts_total", "budget"),
        ("cresset_limit_refusals_total", "plan"),
        ("cresset_limit_refusals_total", "limit"),
        ("cresset_certificate_not_after_seconds", "listener"),
        ("cresset_backup_age_seconds", "kind"),
        ("cresset_ledger_audit_age_seconds", "covered"),
    ] {
        assert!(README.contains(&format!("`{}`", name.trim_end_matches("_total"))), "{name}");
        told.entry(name.to_owned()).or_default().insert(label.to_owned());
    }
    let to = folder.path().join("boards");
    folder.json(&["metrics", "dashboards", to.to_str().unwrap()]);
    let read = |name: &str| std::fs::read_to_string(to.join(name)).unwrap();
    let mut found = Vec::new();
    expressions(&serde_json::from_str(&read("cresset-board.json")).unwrap(), &mut found);
    let alerts = read("cresset-alerts.yml");
    found.extend(alerts.lines().filter_map(|line| Some(line.split_once("expr: ")?.1.to_owned())));
    assert!(found.len() > 40, "{}", found.len());
    let problems: Vec<_> = found.iter().filter_map(|text| wrong(text, &told)).collect();
    assert!(problems.is_empty(), "{problems:#?}");
    for bad in ["cresset_nothing", "sum by (colour) (cresset_ready)", "sum(cresset_ready", "1"] {
        assert!(wrong(bad, &told).is_some(), "{bad} passes");
    }
    assert!(node.terminate().success());
}
