//! Measures the node around the engine, with an engine whose tokens cost no time: HTTP, template,
//! scheduler, ledger, streams and reads. Run it with `cargo bench --bench node [--
//! streams|one|reads]`.
//!
//! This process is the node. The load comes from `cresset bench` in a process beside it, so the CPU
//! time printed here is the node's own; both share the machine's cores.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]

#[allow(dead_code, reason = "tests use what a bench does not")]
#[path = "../it/support.rs"]
mod support;

use serde_json::Value;
use std::pin::Pin;
use std::process::Command;
use std::time::Duration;
use support::World;

const STREAMS: &str = "256";
const OUTPUT_TOKENS: &str = "800";

fn main() {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let run = |name: &str, bench: Pin<Box<dyn Future<Output = ()>>>| {
        if wanted.is_empty() || wanted.iter().any(|part| name.contains(part)) {
            runtime.block_on(bench);
        }
    };
    run("streams", Box::pin(streams(Duration::from_millis(5))));
    run("streams of an endless engine", Box::pin(streams(Duration::ZERO)));
    run("one client", Box::pin(one_client()));
    run("reads", Box::pin(reads()));
}

async fn node(step: Duration, num_blocks: usize) -> World {
    World::with(|setup| {
        let plan = setup.config.plans.get_mut("default").unwrap();
        plan.max_concurrent = 1_024;
        (setup.step, setup.ends, setup.premium) = (step, false, 1 << 50);
        (setup.max_rows, setup.max_batched_tokens, setup.num_blocks) = (256, 8_192, num_blocks);
    })
    .await
}

/// CPU time this process has used, in user and in kernel mode; Linux counts it in hundredths of a
/// second.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let ticks: u64 =
        fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

/// The document that `cresset bench` prints about the node, and the CPU time that the node spent
/// meanwhile.
async fn load(world: &World, arguments: &[&str]) -> (Value, Duration) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cresset"));
    command.args([
        "bench",
        "--json",
        "--url",
        &format!("http://{}", world.address),
        "--key",
        &world.key,
    ]);
    command.args(arguments);
    let before = cpu();
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let spent = cpu().saturating_sub(before);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    (serde_json::from_slice(&output.stdout).unwrap(), spent)
}

async fn streams(step: Duration) {
    // There is room for all streams at once, so that nothing waits and nothing is preempted.
    let world = node(step, 32_768).await;
    let shape = [
        "--concurrency",
        STREAMS,
        "--requests",
        STREAMS,
        "--input-tokens",
        "32",
        "--output-tokens",
        OUTPUT_TOKENS,
    ];
    let (document, spent) = load(&world, &shape).await;
    let level = &document["levels"][0];
    let tokens = level["completion_tokens"].as_f64().unwrap();
    println!(
        "{STREAMS} streams, engine steps of {step:?}: {:.0} tokens/s, {:.1} µs of the node's CPU a \
         token, ms between tokens {}, errors {}",
        level["output_tokens_per_second"].as_f64().unwrap(),
        spent.as_secs_f64() * 1e6 / tokens,
        level["inter_token_ms"],
        level["errors"],
    );
    world.close().await;
}

async fn one_client() {
    let world = node(Duration::ZERO, 4_096).await;
    let shape =
        ["--concurrency", "1", "--requests", "200", "--input-tokens", "32", "--output-tokens", "1"];
    let (document, spent) = load(&world, &shape).await;
    let level = &document["levels"][0];
    println!(
        "one client, one token: ms to it {}, to the end {}, {:.0} µs of the node's CPU a request",
        level["time_to_first_token_ms"],
        level["end_to_end_ms"],
        spent.as_secs_f64() * 1e6 / level["answered"].as_f64().unwrap(),
    );
    world.close().await;
}

async fn reads() {
    let world = node(Duration::ZERO, 4_096).await;
    let (mut answered, mut busy) = (0.0, Duration::ZERO);
    for clients in ["1", "8", "64"] {
        let (document, spent) = load(&world, &["--reads", "--concurrency", clients]).await;
        for row in document["reads"].as_array().unwrap() {
            answered += row["answered"].as_f64().unwrap();
            println!(
                "{clients} clients, {}: {:.0} reads/s; at half: {:.0} reads/s, ms {}",
                row["path"].as_str().unwrap().split('/').nth(2).unwrap(),
                row["per_second"].as_f64().unwrap(),
                row["half"]["per_second"].as_f64().unwrap(),
                row["half"]["milliseconds"],
            );
        }
        busy += spent;
    }
    println!("reads: {:.1} µs of the node's CPU each", busy.as_secs_f64() * 1e6 / answered);
    world.close().await;
}
