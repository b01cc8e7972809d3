//! Budgets, quotas, and what is kept of answers: set by commands, and seen by clients.

use super::process::{Customer, Folder, Reply, Served, eventually, request};
use serde_json::{Value, json};
use uuid::Uuid;

/// A request that costs as much as it may: it makes as many tokens as it asks for.
fn ask(node: &Served, key: &str, id: &str) -> Reply {
    let body = json!({ "model": node.model, "max_tokens": 3, "ignore_eos": true,
                       "messages": [{ "role": "user", "content": "hi" }] });
    node.chat(key, id, &body).finish()
}

fn charged(answer: &Reply) -> u64 {
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["credits"]["chargedUnits"].as_str().unwrap().parse().unwrap()
}

fn fresh() -> String {
    Uuid::new_v4().to_string()
}

/// The refusal's message, if it is that of a limit that passes with time.
fn refused(answer: &Reply) -> String {
    assert_eq!(answer.status, 429, "{}", answer.body);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "conversation_rate_limit");
    let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
    error["message"].as_str().unwrap().to_owned()
}

#[test]
fn a_budget_stops_what_would_pass_it_and_is_told() {
    let folder = Folder::ready();
    let Customer { account, key, key_id } = folder.customer(1_000_000);
    let node = folder.serve();
    let cost = charged(&ask(&node, &key, &fresh()));
    let units = (2 * cost).to_string();
    let budget = ["budget", &*key_id, "--period", "month", "--alert-percent", "80"];
    let set = folder.json(&[&["keys"][..], &budget, &["--units", &units]].concat());
    assert_eq!(set["budget_use"], "month 50 %", "what was spent before counts");
    let id = fresh();
    let second = charged(&ask(&node, &key, &id));
    let told = refused(&ask(&node, &key, &fresh()));
    assert!(told.contains("key's budget") && told.contains("a month"), "{told}");
    assert!(told.contains("it renews at"), "{told}");
    assert_eq!(charged(&ask(&node, &key, &id)), second, "an answer that was paid for is replayed");

    let alerts = folder.json(&["status"])["budget_alerts"].clone();
    assert_eq!(alerts.as_array().unwrap().len(), 1, "{alerts}");
    assert_eq!((&alerts[0]["key_id"], &alerts[0]["period"]), (&json!(key_id), &json!("month")));
    let metrics = request(&node.operator, "GET /metrics HTTP/1.1\r\n", "").finish().body;
    for line in [
        "cresset_budget_alerts_total{budget=\"key_month\"} 1",
        "cresset_limit_refusals_total{plan=\"default\",limit=\"key_budget\"} 1",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    let keys = folder.json(&["keys", "list", "--account", &account]);
    let today = chrono::Utc::now().date_naive();
    let day: chrono::NaiveDate = keys["data"][0]["last_used_on"].as_str().unwrap().parse().unwrap();
    assert!((today - day).num_days() <= 1, "{day}");

    folder.json(&["keys", "budget", &key_id, "--period", "month", "--none"]);
    let account_budget = ["accounts", "budget", &account, "--period", "day", "--units", "0"];
    let shown = folder.json(&account_budget);
    assert_eq!(shown["spending"][0]["budgetUnits"], "0");
    assert_eq!(shown["spending"][0]["spentUnits"], (cost + second).to_string());
    assert!(refused(&ask(&node, &key, &fresh())).contains("account's budget"));
    assert!(node.log().contains("a budget is nearly spent"));
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    folder.json(&["accounts", "budget", &account, "--period", "day", "--none"]);
    folder.fails(&["keys", "budget", &fresh(), "--period", "day", "--units", "1"], 1);
    for wrong in [&["--units", "1", "--none"][..], &[], &["--none", "--alert-percent", "5"]] {
        let command = ["accounts", "budget", &account, "--period", "day"];
        folder.fails(&[&command[..], wrong].concat(), 2);
    }
}

#[test]
fn a_plan_has_a_quota_of_tokens() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(1_000_000);
    let config = folder.path().join("cresset.toml");
    let mut text = std::fs::read_to_string(&config).unwrap_or_default();
    text.push_str("\n[plans.default]\ntokens_per_day = 1\n");
    std::fs::write(&config, text).unwrap();
    let node = folder.serve();
    let told = refused(&ask(&node, &key, &fresh()));
    assert!(told.contains("quota of the account's plan is 1 tokens a day"), "{told}");
    let shown = folder.json(&["accounts", "show", &account]);
    assert_eq!(shown["spending"][0]["quota_tokens"], 1);
    assert!(node.terminate().success());
}

#[test]
fn answers_are_erased_or_never_kept() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let stored = || folder.json(&["accounts", "show", &account])["stored_answer_bytes"].clone();
    let [first, second, third] = [fresh(), fresh(), fresh()];
    for id in [&first, &second] {
        charged(&ask(&node, &key, id));
    }
    let one = ["accounts", "erase-answers", &account, "--request", &first];
    assert_eq!(folder.json(&one)["erased_answers"], 1);
    let gone = |id: &str| {
        let again = ask(&node, &key, id);
        assert_eq!(
            (again.status, &again.json()["error"]["code"]),
            (410, &json!("request_result_expired")),
            "{}",
            again.body
        );
        let receipt = node.get(&key, &format!("/v1/requests/{id}/receipt"));
        assert_eq!(receipt.status, 410, "{}", receipt.body);
    };
    gone(&first);
    assert_eq!(ask(&node, &key, &second).header("idempotent-replayed"), Some("true"));
    let off = ["accounts", "change", &account, "--store-answers", "off", "--note", "keeps nothing"];
    let changed = folder.json(&off);
    assert_eq!(
        (&changed["stores_answers"], &changed["note"]),
        (&json!(false), &json!("keeps nothing"))
    );
    let before = stored();
    charged(&ask(&node, &key, &third));
    gone(&third);
    assert_eq!(stored(), before, "nothing was added");
    folder.fails(&["accounts", "erase-answers", &account, "--request", &fresh()], 1);
    let closed = folder.json(&["accounts", "close", &account, "--erase-answers"]);
    assert_eq!((&closed["erased_answers"], &closed["stored_answer_bytes"]), (&json!(1), &json!(0)));
    let listed = folder.run(&["accounts", "list"]).stdout;
    assert!(listed.contains("keeps nothing"), "{listed}");
    let long = "x".repeat(1_001);
    folder.fails(&["accounts", "change", &account, "--note", &long], 1);
    assert_eq!(folder.json(&["accounts", "change", &account, "--note", ""])["note"], Value::Null);
    let acts = folder.json(&["admin", "log"]).to_string();
    assert!(acts.contains("account_erase_answers") && acts.contains("account_change"), "{acts}");
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_release_keeps_the_prices_that_it_has_had() {
    let folder = Folder::ready();
    let node = folder.serve();
    let history = || folder.json(&["models", "price", "tiny", "--history"])["data"].clone();
    eventually("the first prices are noted", || history().as_array().unwrap().len() == 1);
    let output = history()[0]["output"].as_u64().unwrap() + 1;
    folder.json(&["models", "price", "tiny", "--output", &output.to_string()]);
    let now = history();
    assert_eq!(now.as_array().unwrap().len(), 2, "{now}");
    assert_eq!(now[1]["output"], output);
    assert!(now[1]["revision"].as_u64() > now[0]["revision"].as_u64());
    assert!(node.terminate().success());
    let manifest = folder.path().join("models/tiny/manifest.toml");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let edited = text.replace(&format!("output = {output}"), "output = 777777");
    assert_ne!(text, edited);
    std::fs::write(&manifest, edited).unwrap();
    let node = folder.serve();
    eventually("an edit is noted", || history().as_array().unwrap().len() == 3);
    assert!(node.terminate().success());
}
