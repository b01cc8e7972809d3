//! Kills the process in the middle of its work: unfinished requests are not charged, and finished
//! ones are not lost.

use crate::process::{Customer, Folder, Reply, Served, Stream};
use crate::volley::{Call, volley};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

const TRIAL: u64 = 100_000_000;
const STREAMS: usize = 8;
/// The small model needs far longer for so many tokens than a test needs to kill the process.
const LONG: u32 = 1_500;

/// Each `seed` makes another input, because an input that was running in two crashes is refused.
fn long(node: &Served, stream: bool, max_tokens: u32, seed: usize) -> Value {
    json!({ "model": node.model, "messages": [{ "role": "user", "content": "tell me everything" }],
            "stream": stream, "max_tokens": max_tokens, "ignore_eos": true, "seed": seed })
}

#[test]
fn a_killed_node_charges_for_what_it_finished_and_nothing_else() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    let node = folder.serve();
    let done = Uuid::new_v4().to_string();
    let finished = node.chat(&key, &done, &long(&node, false, 8, 0)).finish();
    assert_eq!(finished.status, 200, "{}", finished.body);
    let charged: u64 =
        finished.json()["credits"]["chargedUnits"].as_str().unwrap().parse().unwrap();

    let open = open_streams(&node, &key);
    node.kill();
    drop(open.streams);

    let unfinished: Vec<String> = open.ids;
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    for id in &unfinished {
        let request = folder.json(&["requests", "show", id]);
        let end = (&request["state"], &request["failure_code"], &request["chargedUnits"]);
        assert_eq!(end, (&json!("failed"), &json!("node_restarted"), &json!("0")), "{request}");
    }
    let credits = folder.json(&["credits", "show", "--account", &account]);
    let balance =
        (credits["trialUnits"].as_str().unwrap(), credits["reservedUnits"].as_str().unwrap());
    assert_eq!(balance, ((TRIAL - charged).to_string().as_str(), "0"));

    let node = folder.serve();
    let replayed = node.chat(&key, &done, &long(&node, false, 8, 0)).finish();
    assert_eq!(replayed.body, finished.body, "byte for byte");
    assert_eq!(replayed.headers["idempotent-replayed"], "true");
    let retried = node.chat(&key, &unfinished[0], &long(&node, true, LONG, 0)).finish();
    assert!(
        retried.body.ends_with("data: [DONE]\n\n"),
        "a request of the node's failure may be sent again: {}",
        retried.body
    );
    assert_eq!(folder.json(&["requests", "show", &unfinished[0]])["attempt_count"], 2);
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    assert!(node.terminate().success());
}

struct Open {
    ids: Vec<String>,
    streams: Vec<Stream>,
}

/// Opens streams and returns them once they have begun; they still run for long.
fn open_streams(node: &Served, key: &str) -> Open {
    let ids: Vec<String> = (0..STREAMS).map(|_| Uuid::new_v4().to_string()).collect();
    let mut streams: Vec<Stream> = ids
        .iter()
        .enumerate()
        .map(|(seed, id)| node.chat(key, id, &long(node, true, LONG, seed)))
        .collect();
    for stream in &mut streams {
        assert_eq!(stream.status, 200);
    }
    // The last stream has a token: the engine is in the middle of all of them.
    streams[STREAMS - 1].read_until("\"content\":");
    Open { ids, streams }
}

/// Kills a node under load after each of the pauses (milliseconds), on one ledger. A client that
/// got a whole answer gets the same answer again.
fn kill_after(pauses: impl Iterator<Item = u64>) {
    let folder = Folder::ready();
    let plan = "[plans.default]\nrequests_per_minute = 1000000\nburst = 1000000\n";
    std::fs::write(folder.path().join("cresset.toml"), plan).unwrap();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    let mut answered: Vec<(String, Value, Reply)> = Vec::new();
    for pause in pauses {
        let node = folder.serve();
        let bodies: Vec<(String, Value)> = (0..STREAMS * 2)
            .map(|i| {
                // Every input is new, because an input that runs in two crashes is refused.
                let seed = Uuid::new_v4().as_u128() as u32 as usize;
                (
                    Uuid::new_v4().to_string(),
                    long(&node, i % 3 == 0, if i % 2 == 0 { LONG } else { 8 }, seed),
                )
            })
            .collect();
        let calls =
            bodies.iter().map(|(id, body)| Call::chat(&node.listen, &key, id, body)).collect();
        let replies = std::thread::scope(|scope| {
            let racing = scope.spawn(|| volley(calls));
            std::thread::sleep(Duration::from_millis(50 + pause));
            node.kill();
            racing.join().unwrap()
        });
        let whole = bodies
            .into_iter()
            .zip(replies)
            .filter_map(|((id, body), reply)| Some((id, body, reply?)));
        answered.extend(whole.filter(|(.., reply)| reply.status == 200));
        let audit = folder.json(&["ledger", "audit"]);
        assert_eq!(audit["ok"], true, "killed after {pause} ms: {audit}");
    }
    let node = folder.serve();
    for (id, body, reply) in &answered {
        let again = Call::chat(&node.listen, &key, id, body).go().unwrap();
        assert_eq!(
            (again.status, again.headers["idempotent-replayed"].as_str()),
            (200, "true"),
            "{id}"
        );
        assert!(body["stream"] == true || again.body == reply.body, "{id}: byte for byte");
    }
    let rows = folder.json(&["requests", "list", "--account", &account]);
    let charged: u64 =
        rows["data"].as_array().unwrap().iter().map(|row| units(&row["chargedUnits"])).sum();
    let credits = folder.json(&["credits", "show", "--account", &account]);
    assert_eq!(
        (units(&credits["trialUnits"]), units(&credits["reservedUnits"])),
        (TRIAL - charged, 0)
    );
}

#[test]
fn kills_at_any_moment_leave_a_sound_ledger() {
    kill_after([0, 3, 9, 27, 81, 243].into_iter());
}

#[test]
#[ignore = "minutes: many more kills"]
fn two_hundred_kills_of_the_real_binary_lose_nothing() {
    kill_after((0..200).map(|round| round * 37 % 250));
}

fn units(value: &Value) -> u64 {
    value.as_str().unwrap().parse().unwrap()
}

#[test]
fn a_drain_lets_running_requests_finish() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(TRIAL);
    let mut node = folder.serve();
    let id = Uuid::new_v4().to_string();
    let mut stream = node.chat(&key, &id, &long(&node, true, LONG / 10, 0));
    stream.read_until("\"content\":");
    node.signal("TERM");
    let rest = stream.rest();
    assert!(
        rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]\n\n"),
        "{rest}"
    );
    assert!(node.wait().success());
    assert_eq!(folder.json(&["requests", "show", &id])["state"], "completed");
}
