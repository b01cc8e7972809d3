//! A price changes between two starts: booked charges stay, and new requests cost the new price.

use crate::process::{Folder, MODEL, Reply, Served};
use serde_json::{Value, json};
use uuid::Uuid;

const GRANTED: u64 = 1_000_000;

fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value}")).parse().unwrap()
}

fn charged(reply: &Reply) -> u64 {
    units(&reply.json()["credits"]["chargedUnits"])
}

#[test]
fn a_new_price_holds_for_new_requests_alone() {
    let folder = Folder::ready();
    let key = folder.customer(GRANTED).key;
    let ids = [(); 2].map(|()| Uuid::new_v4().to_string());
    let ask = |node: &Served, id: &str| {
        let messages = json!([{ "role": "user", "content": "hello" }]);
        let body = json!({ "model": node.model, "messages": messages, "max_tokens": 10, "ignore_eos": true });
        node.chat(&key, id, &body).finish()
    };
    let left = |node: &Served| units(&node.get(&key, "/v1/credits").json()["trialUnits"]);

    let node = folder.serve();
    let first = ask(&node, &ids[0]);
    let prompt = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(charged(&first), (prompt * 100_000 + 10 * 400_000).div_ceil(1_000_000));
    node.terminate();

    let manifest = folder.path().join("models").join(MODEL).join("manifest.toml");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("output = 400000", "output = 7000000")).unwrap();
    let node = folder.serve();
    assert_eq!(
        node.get(&key, "/v1/models").json()["data"][0]["pricing"]["outputUnitsPerMillion"],
        "7000000"
    );
    let replayed = ask(&node, &ids[0]);
    assert_eq!(
        (replayed.headers["idempotent-replayed"].as_str(), &replayed.body),
        ("true", &first.body)
    );
    assert_eq!(left(&node), GRANTED - charged(&first));
    let second = ask(&node, &ids[1]);
    assert_eq!(charged(&second), (prompt * 100_000 + 10 * 7_000_000).div_ceil(1_000_000));
    assert_eq!(left(&node), GRANTED - charged(&first) - charged(&second));
    let record = node.get(&key, &format!("/v1/requests/{}", ids[0])).json();
    assert_eq!(units(&record["chargedUnits"]), charged(&first));
    node.terminate();
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_command_changes_prices_while_the_node_runs_and_while_it_does_not() {
    let folder = Folder::ready();
    let key = folder.customer(GRANTED).key;
    let price =
        |arguments: &[&str]| folder.json(&[&["models", "price", MODEL], arguments].concat());
    let set = price(&["--output", "3_000_000"]);
    assert_eq!((&set["before"]["output"], &set["output"]), (&json!(400_000), &json!(3_000_000)));
    let node = folder.serve();
    let listed = |name: &str| {
        node.get(&key, "/v1/models").json()["data"][0]["pricing"][name].as_str().unwrap().to_owned()
    };
    assert_eq!(listed("outputUnitsPerMillion"), "3000000");
    let set = price(&["--input", "200_000", "--cached-input", "0"]);
    assert_eq!(set["revision"].as_u64().unwrap(), set["before"]["revision"].as_u64().unwrap() + 1);
    let now = ["inputUnitsPerMillion", "cachedInputUnitsPerMillion", "outputUnitsPerMillion"];
    assert_eq!(now.map(listed), ["200000", "0", "3000000"], "at once, without a restart");
    assert_eq!(price(&[])["revision"], set["revision"], "nothing was changed");
    let refused = folder.fails(&["models", "price", MODEL, "--cached-input", "200_001"], 1);
    assert!(refused.contains("cached"), "{refused}");
    assert!(folder.fails(&["models", "price", "none", "--input", "1"], 1).contains("no release"));
    let log = folder.json(&["admin", "log"]).to_string();
    assert!(log.contains("model_price") && log.contains("200000"), "{log}");
    node.terminate();
}
