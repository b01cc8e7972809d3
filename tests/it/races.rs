//! Races for credits, ids and ends over the real binary: connections whose last bytes arrive
//! together.

use crate::process::{Customer, Folder, Reply, Served, eventually};
use crate::volley::{Call, volley};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use uuid::Uuid;

const OUTPUT: u32 = 60;
/// Steps take so long that admitted requests still run when the last of the race is decided.
const SLOW: &str = "engine::step=sleep(20)";

struct Arena {
    folder: Folder,
    node: Served,
}

impl Arena {
    fn open(points: &str, max_concurrent: u32) -> Self {
        let folder = Folder::ready();
        let plan = format!(
            "[plans.default]\nrequests_per_minute = 1000000\nburst = 1000000\nmax_concurrent = {max_concurrent}\n"
        );
        std::fs::write(folder.path().join("cresset.toml"), plan).unwrap();
        let node = folder.serve_failing(points);
        Self { folder, node }
    }

    fn ask(&self, seed: usize) -> Value {
        json!({ "model": self.node.model, "messages": [{ "role": "user", "content": "hello" }],
                "max_tokens": OUTPUT, "ignore_eos": true, "seed": seed })
    }

    fn chat(&self, key: &str, id: &str, body: &Value) -> Call {
        Call::chat(&self.node.listen, key, id, body)
    }

    fn request(&self, key: &str, id: &str) -> Value {
        self.node.get(key, &format!("/v1/requests/{id}")).json()
    }

    /// The amount that one request of `ask` reserves.
    fn reservation(&self) -> u64 {
        let Customer { key, .. } = self.folder.customer(1_000);
        let reply = self.chat(&key, &fresh(), &self.ask(0)).go().unwrap();
        let prompt = reply.json()["usage"]["prompt_tokens"].as_u64().unwrap();
        (prompt * 100_000 + u64::from(OUTPUT) * 400_000).div_ceil(1_000_000)
    }

    /// `[trial, premium, reserved]`.
    fn balances(&self, account: &str) -> [u64; 3] {
        let credits = self.folder.json(&["credits", "show", "--account", account]);
        ["trialUnits", "premiumUnits", "reservedUnits"].map(|name| units(&credits[name]))
    }

    fn grant(&self, account: &str, bucket: &str, amount: u64) {
        let amount = amount.to_string();
        let grant = [
            "--account",
            account,
            "--bucket",
            bucket,
            "--units",
            amount.as_str(),
            "--reference",
            "more",
        ];
        self.folder.json(&[&["credits", "grant"], &grant[..]].concat());
    }

    fn records(&self, account: &str) -> usize {
        self.folder.json(&["requests", "list", "--account", account])["data"]
            .as_array()
            .unwrap()
            .len()
    }

    fn close(self) {
        let audit = self.folder.json(&["ledger", "audit"]);
        assert_eq!(
            (&audit["ok"], &audit["checked"]["reservations"]),
            (&json!(true), &json!(0)),
            "{audit}"
        );
        assert!(self.node.terminate().success());
    }
}

fn fresh() -> String {
    Uuid::new_v4().to_string()
}

fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value}")).parse().unwrap()
}

fn charge(reply: &Reply) -> u64 {
    units(&reply.json()["credits"]["chargedUnits"])
}

fn whole(replies: Vec<Option<Reply>>) -> Vec<Reply> {
    replies.into_iter().map(|reply| reply.expect("a whole answer")).collect()
}

/// Statuses with the codes of errors, and how many there are of each.
fn tally(replies: &[Reply]) -> Vec<(u16, String, usize)> {
    let kind = |reply: &Reply| {
        let code = reply.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
        (reply.status, code)
    };
    let kinds: BTreeSet<_> = replies.iter().map(kind).collect();
    let count =
        |wanted: &(u16, String)| replies.iter().filter(|reply| kind(reply) == *wanted).count();
    kinds
        .into_iter()
        .map(|(status, code)| {
            let n = count(&(status, code.clone()));
            (status, code, n)
        })
        .collect()
}

#[test]
fn a_balance_admits_as_many_as_it_covers_trial_first() {
    let arena = Arena::open(SLOW, 1_000);
    let cost = arena.reservation();
    let Customer { account, key, .. } = arena.folder.customer(cost * 5 / 2);
    arena.grant(&account, "premium", cost * 5 - cost * 5 / 2);
    let replies =
        whole(volley((0..128).map(|seed| arena.chat(&key, &fresh(), &arena.ask(seed))).collect()));
    assert_eq!(tally(&replies), [(200, String::new(), 5), (402, "credits_reserved".into(), 123)]);
    let charged: u64 = replies.iter().filter(|reply| reply.status == 200).map(charge).sum();
    let [trial, premium, reserved] = arena.balances(&account);
    assert_eq!((trial + premium, reserved), (cost * 5 - charged, 0));
    assert!(
        trial < cost && premium < 3 * cost,
        "the split ones took trial first: {trial} {premium}"
    );
    assert_eq!(arena.records(&account), 5, "a refused one leaves no record");
    arena.close();
}

#[test]
fn one_id_is_one_run_however_often_it_is_sent_at_once() {
    let arena = Arena::open("", 1_000);
    let Customer { account, key, .. } = arena.folder.customer(1_000_000);
    let mut left = 1_000_000;
    for (width, points) in [(64, 1), (256, 2)] {
        let (id, body) = (fresh(), arena.ask(points));
        let replies = whole(volley((0..width).map(|_| arena.chat(&key, &id, &body)).collect()));
        assert_eq!(tally(&replies), [(200, String::new(), width)]);
        assert!(replies.iter().all(|reply| reply.body == replies[0].body));
        left -= charge(&replies[0]);
        assert_eq!(arena.balances(&account), [left, 0, 0]);
        assert_eq!(arena.request(&key, &id)["attempt_count"], 1);
    }
    arena.close();
}

#[test]
fn of_two_bodies_under_one_id_one_wins() {
    let arena = Arena::open("", 1_000);
    let Customer { account, key, .. } = arena.folder.customer(1_000_000);
    let mut left = 1_000_000;
    for round in 0..3 {
        let streaming = json!({ "stream": round == 2 });
        let mut bodies = [arena.ask(0), arena.ask(usize::from(round < 2))];
        bodies[1]["stream"] = streaming["stream"].clone();
        let id = fresh();
        let replies =
            whole(volley((0..64).map(|i| arena.chat(&key, &id, &bodies[i % 2])).collect()));
        let won: Vec<&Reply> = replies.iter().filter(|reply| reply.status == 200).collect();
        let lost = replies.iter().filter(|reply| reply.status == 422).collect::<Vec<_>>();
        // At most four may listen to one stream; the others are told to come back.
        let full = replies.iter().filter(|reply| reply.status == 409).count();
        assert_eq!((won.len() + full, lost.len()), (32, 32), "round {round}");
        assert!(lost.iter().all(|reply| reply.json()["error"]["code"] == "idempotency_key_reused"));
        assert!(full == 0 || won[0].body.starts_with("data: "));
        left -= units(&arena.request(&key, &id)["chargedUnits"]);
        assert_eq!(arena.balances(&account), [left, 0, 0]);
    }
    arena.close();
}

#[test]
fn a_key_and_three_applications_race_for_the_last_credits() {
    let arena = Arena::open(SLOW, 1_000);
    let cost = arena.reservation();
    let Customer { account, key, .. } = arena.folder.customer(cost);
    let mut keys = vec![key];
    for name in ["one", "two", "three"] {
        let application =
            arena.folder.json(&["applications", "create", "--account", &account, "--name", name]);
        let token = arena.folder.json(&[
            "applications",
            "token",
            "--application",
            application["id"].as_str().unwrap(),
        ]);
        keys.push(token["secret"].as_str().unwrap().to_owned());
    }
    // The id stands for another request in each scope.
    let (id, body) = (fresh(), arena.ask(1));
    let replies = whole(volley((0..64).map(|i| arena.chat(&keys[i % 4], &id, &body)).collect()));
    assert_eq!(tally(&replies), [(200, String::new(), 16), (402, "credits_reserved".into(), 48)]);
    let winners: BTreeSet<usize> =
        (0..64).filter(|i| replies[*i].status == 200).map(|i| i % 4).collect();
    assert_eq!(winners.len(), 1, "all of one scope");
    assert_eq!(
        arena.balances(&account),
        [cost - charge(replies.iter().find(|r| r.status == 200).unwrap()), 0, 0]
    );
    assert_eq!(arena.records(&account), 1);
    arena.close();
}

#[test]
fn a_concurrency_limit_holds_in_a_race_over_all_keys() {
    let arena = Arena::open(SLOW, 3);
    let Customer { account, key, .. } = arena.folder.customer(1_000_000);
    let other = arena.folder.json(&["keys", "create", "--account", &account]);
    let keys = [key.as_str(), other["secret"].as_str().unwrap()];
    let replies =
        whole(volley((0..64).map(|i| arena.chat(keys[i % 2], &fresh(), &arena.ask(i))).collect()));
    assert_eq!(tally(&replies), [(200, String::new(), 3), (429, "concurrency_limit".into(), 61)]);
    assert_eq!(arena.records(&account), 3);
    arena.close();
}

#[test]
fn a_grant_admits_requests_that_come_after_it() {
    let arena = Arena::open("", 1_000);
    let Customer { account, key, .. } = arena.folder.customer(0);
    let ids: Vec<String> = (0..32).map(|_| fresh()).collect();
    let calls = ids.iter().map(|id| arena.chat(&key, id, &arena.ask(0))).collect();
    let replies = std::thread::scope(|scope| {
        let granting = scope.spawn(|| arena.grant(&account, "premium", 1_000_000));
        let replies = whole(volley(calls));
        granting.join().unwrap();
        replies
    });
    let refused = replies
        .iter()
        .filter(|reply| {
            reply.status == 402 && reply.json()["error"]["code"] == "insufficient_credits"
        })
        .count();
    assert_eq!(
        refused + replies.iter().filter(|reply| reply.status == 200).count(),
        32,
        "{:?}",
        tally(&replies)
    );
    assert_eq!(arena.records(&account), 32 - refused);
    let mut charged = 0;
    for (id, reply) in ids.iter().zip(&replies) {
        // The id of a refused request is free, also for another body.
        let body = arena.ask(usize::from(reply.status == 402));
        let again = arena.chat(&key, id, &body).go().unwrap();
        assert_eq!(
            (again.status, again.headers.contains_key("idempotent-replayed")),
            (200, reply.status == 200)
        );
        charged += charge(&again);
    }
    assert_eq!(arena.balances(&account), [0, 1_000_000 - charged, 0]);
    arena.close();
}

#[test]
fn a_hundred_deletes_are_one() {
    let arena = Arena::open(SLOW, 1_000);
    let Customer { account, key, .. } = arena.folder.customer(1_000_000);
    let id = fresh();
    let path = format!("/v1/requests/{id}");
    let replies = std::thread::scope(|scope| {
        let run = scope.spawn(|| arena.chat(&key, &id, &arena.ask(0)).go().unwrap());
        eventually("it runs", || arena.request(&key, &id)["state"] == "running");
        let deletes = volley(
            (0..100).map(|_| Call::plain(&arena.node.listen, "DELETE", &path, &key)).collect(),
        );
        assert_eq!(run.join().unwrap().json()["error"]["code"], "request_cancelled");
        whole(deletes)
    });
    let end = arena.request(&key, &id);
    assert_eq!(end["state"], "cancelled");
    assert!(
        replies.iter().all(|reply| reply.status == 200 && reply.json() == end),
        "{:?}",
        tally(&replies)
    );
    assert_eq!(arena.balances(&account), [1_000_000 - units(&end["chargedUnits"]), 0, 0]);
    arena.close();
}

#[test]
fn a_revocation_ends_or_keeps_out_every_racer() {
    let arena = Arena::open(SLOW, 1_000);
    let Customer { account, .. } = arena.folder.customer(1_000_000);
    let create = || arena.folder.json(&["keys", "create", "--account", &account]);
    let reader = create();
    let (mut records, mut charged) = (0, 0);
    for pause in [0, 40, 80, 120] {
        let issued = create();
        let ids: Vec<String> = (0..32).map(|_| fresh()).collect();
        let key = issued["secret"].as_str().unwrap();
        let calls = ids.iter().map(|id| arena.chat(key, id, &arena.ask(0))).collect();
        let replies = std::thread::scope(|scope| {
            let racers = scope.spawn(|| whole(volley(calls)));
            std::thread::sleep(Duration::from_millis(pause));
            arena.folder.json(&["keys", "revoke", issued["id"].as_str().unwrap()]);
            racers.join().unwrap()
        });
        for (id, reply) in ids.iter().zip(&replies) {
            let request = arena.request(reader["secret"].as_str().unwrap(), id);
            if reply.status == 401 {
                assert_eq!(
                    request["error"]["code"], "request_not_found",
                    "who was kept out left no record"
                );
                continue;
            }
            assert_eq!(
                (reply.status, &request["state"]),
                (409, &json!("cancelled")),
                "{}",
                reply.body
            );
            records += 1;
            charged += units(&request["chargedUnits"]);
        }
    }
    assert_eq!(arena.records(&account), records);
    assert_eq!(arena.balances(&account), [1_000_000 - charged, 0, 0]);
    arena.close();
}

#[test]
fn a_key_may_be_rotated_between_an_attempt_and_its_retry() {
    let arena = Arena::open("engine::step=1*return", 1_000);
    let Customer { account, key, key_id } = arena.folder.customer(1_000_000);
    let (id, body) = (fresh(), arena.ask(0));
    assert_eq!(arena.chat(&key, &id, &body).go().unwrap().status, 500);
    let first = arena.request(&key, &id);
    let other = arena.folder.json(&["keys", "create", "--account", &account]);
    arena.folder.json(&["keys", "revoke", &key_id]);
    assert_eq!(arena.chat(&key, &id, &body).go().unwrap().status, 401);
    let other = other["secret"].as_str().unwrap();
    let second = arena.chat(other, &id, &body).go().unwrap();
    let request = arena.request(other, &id);
    assert_eq!(
        (second.status, &request["attempt_count"], &request["retry_of"]),
        (200, &json!(2), &first["attempt_id"])
    );
    arena.close();
}
