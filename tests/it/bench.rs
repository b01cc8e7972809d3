//! Runs `cresset bench` with the real binary: it counts the requests that were done and those that
//! were refused.

use crate::process::{Finished, Folder};
use crate::support::World;
use serde_json::{Value, json};

/// Runs the benchmark against a node that this test serves.
async fn bench(world: &World, arguments: &'static [&'static str]) -> Finished {
    let (url, key) = (format!("http://{}", world.address), world.key.clone());
    let run = move || {
        let common = ["bench", "--json", "--input-tokens", "40", "--url", &url, "--key", &key];
        Folder::empty().run(&[&common[..], arguments].concat())
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_counted_as_the_node_charged_them() {
    let world = World::with(|setup| setup.premium = 1 << 40).await;
    let before: u64 = world.balances().await.iter().take(2).sum();
    let arguments = &["--concurrency", "1,3", "--requests", "6", "--output-tokens", "5"];
    let document = bench(&world, arguments).await.document();
    for (level, clients) in [(&document["levels"][0], 1), (&document["levels"][1], 3)] {
        let counts = ["concurrency", "answered", "failed", "completion_tokens"]
            .map(|name| level[name].as_u64().unwrap());
        assert_eq!(counts, [clients, 6, 0, 30], "end-of-text is ignored: {level}");
        let prompt = number(&level["prompt_tokens"]) / 6.0;
        assert!((prompt - 40.0).abs() <= 20.0, "prompts of {prompt} tokens in place of 40");
        assert!(
            number(&level["time_to_first_token_ms"]["p50"])
                <= number(&level["end_to_end_ms"]["p99"])
        );
    }
    assert!(
        world.balances().await.iter().take(2).sum::<u64>() < before,
        "the answers were real, and paid"
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_counted_by_their_codes() {
    let limited = World::with(|setup| {
        let plan = setup.config.plans.get_mut("default").unwrap();
        // Two requests find the length of the prompt, so four are left for the measurement.
        (plan.requests_per_minute, plan.burst) = (1, 6);
    })
    .await;
    let arguments = &["--concurrency", "2", "--requests", "10", "--output-tokens", "2"];
    let level = bench(&limited, arguments).await.document()["levels"][0].clone();
    assert_eq!((&level["answered"], &level["failed"]), (&json!(4), &json!(6)), "{level}");
    assert_eq!(level["errors"], json!({ "429 conversation_rate_limit": 6 }));
    limited.close().await;

    let poor = World::with(|setup| (setup.trial, setup.premium) = (0, 0)).await;
    let finished = bench(&poor, arguments).await;
    assert_eq!(finished.code, Some(1));
    let error = &finished.document()["error"];
    assert!(error["message"].as_str().unwrap().contains("402 insufficient_credits"), "{error}");
    poor.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_are_measured_on_every_path() {
    let world = World::new().await;
    let document =
        bench(&world, &["--reads", "--concurrency", "2", "--seconds", "1"]).await.document();
    let rows = document["reads"].as_array().unwrap();
    let paths: Vec<_> =
        rows.iter().map(|row| row["path"].as_str().unwrap().split('/').nth(2).unwrap()).collect();
    assert_eq!(paths, ["me", "credits", "requests"]);
    for row in rows {
        assert!(number(&row["half"]["per_second"]) <= number(&row["per_second"]), "{row}");
    }
    world.close().await;
}

#[test]
fn the_ledger_is_measured_on_a_fresh_one_that_goes_away() {
    let folder = Folder::empty();
    let arguments =
        ["bench", "--ledger", "--clients", "1,4", "--seconds", "1", "--simulate-fsync-ms", "5"];
    let document = folder.json(&[&arguments[..], &["--answer-bytes", "700"]].concat());
    assert_eq!(document["audit_ok"], true);
    let pairs = document["levels"].as_array().unwrap().iter().map(|level| number(&level["pairs"]));
    let stored = number(&document["stored_answer_bytes"]) / pairs.sum::<f64>();
    assert!((700.0..800.0).contains(&stored), "{stored} bytes of each answer: {document}");
    for level in document["levels"].as_array().unwrap() {
        assert!(number(&level["pairs"]) > 0.0 && number(&level["fsync_ms"]) >= 5.0, "{level}");
        assert!(
            number(&level["pair_ms"]["p50"]) >= 10.0,
            "two commits, one after the other: {level}"
        );
        assert!(number(&level["fsync_share"]) <= 1.0, "{level}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_folder_without_a_node_hosts_one_for_the_benchmark() {
    let folder = Folder::ready();
    let arguments = [
        "bench",
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--input-tokens",
        "16",
        "--output-tokens",
        "3",
    ];
    let document = folder.json(&arguments);
    assert_eq!(document["levels"][0]["completion_tokens"], 12, "{document}");
    let message = folder.fails(&["bench", "--url", "http://127.0.0.1:1", "--key", "k"], 1);
    assert!(message.contains("cannot connect"), "{message}");
}
