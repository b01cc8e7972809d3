//! What a qualification means for a load.

use crate::Prover;
use crate::subject::EngineSubject;
use cresset_base::{Clock, SystemClock};
use cresset_catalogue::Manifest;
use cresset_engine::{DeviceSetting, EngineHandle, EngineSettings};
use cresset_kernels::gpu::{self, Emulator, ProductChoices};
use cresset_models::loader::gguf::Value;
use cresset_models::testing::{GgufWriter, TinyLlama};
use cresset_node::config::Config;
use cresset_node::{Assembly, ComputeDevice, DueProof, card, inspect};
use cresset_qualification::subject::ScorePath;
use cresset_qualification::testing::records;
use cresset_qualification::{Record, Subject, Suite, Verdict, canary};
use std::collections::BTreeMap;

/// A tiny model with a context of 8 192 tokens that was qualified and accepted.
fn qualified(kv_mib: usize) -> (tempfile::TempDir, Assembly, Manifest, Record) {
    qualified_for(kv_mib, 1 << 20)
}

/// The same, whose quick suite runs a context of `tokens`.
fn qualified_for(kv_mib: usize, tokens: u32) -> (tempfile::TempDir, Assembly, Manifest, Record) {
    let (data, mut config) = (tempfile::tempdir().unwrap(), Config::default());
    (config.engine.kv_mib, config.engine.max_batched_tokens) = (kv_mib, 256);
    config.qualification.quick_context_tokens = tokens;
    let mut gguf = TinyLlama::default().gguf();
    gguf.set("llama.context_length", Value::U32(8192));
    let file = data.path().join("tiny.gguf");
    std::fs::write(&file, gguf.to_bytes()).unwrap();
    let assembly = Assembly::new(data.path().to_owned(), config).unwrap();
    let catalogue = assembly.catalogue();
    let manifest = catalogue.add(&file, None, &inspect, &mut |_| {}).unwrap();
    let record = Prover(&assembly).qualify(&manifest, Suite::Quick, None, &mut |_| {}).unwrap();
    assert_eq!(record.verdict, Verdict::Qualified, "{:?}", record.checks);
    catalogue.accept(&record, true, "it is a test's", SystemClock.now()).unwrap();
    (data, assembly, manifest, record)
}

/// The release that guesses tokens takes memory of its own, which counts. One with another
/// tokenizer is refused, and so is one that is not here.
#[test]
fn a_draft_model_is_loaded_beside_the_model_that_it_guesses_for() {
    let (data, mut assembly, manifest, _record) = qualified(1);
    let mut gguf = TinyLlama { seed: 1, layers: 1, ..TinyLlama::default() }.gguf();
    let add = |name: &str, gguf: &GgufWriter| {
        let file = data.path().join(format!("{name}.gguf"));
        std::fs::write(&file, gguf.to_bytes()).unwrap();
        assembly.catalogue().add(&file, Some(name), &inspect, &mut |_| {}).unwrap();
    };
    add("small", &gguf);
    let Some(Value::Array(tokens)) = gguf.get("tokenizer.ggml.tokens").cloned() else {
        panic!("a GGUF file has tokens")
    };
    let swapped = tokens[..10].iter().chain([&tokens[11], &tokens[10]]).chain(&tokens[12..]);
    gguf.set("tokenizer.ggml.tokens", Value::Array(swapped.cloned().collect()));
    add("other", &gguf);
    let mut serve = |small: &str| {
        assembly.config.engine.draft_models = [(manifest.name.clone(), small.to_owned())].into();
        let proven = assembly.qualified(&manifest, &assembly.host()).unwrap();
        let expected = assembly.expected_bytes(&proven);
        assembly.served_model(proven).map(|served| (expected, (served.load)(0).unwrap().bytes))
    };
    let (expected, bytes) = serve("small").unwrap();
    let other = serve("other").unwrap_err().to_string();
    assert!(other.contains("other cannot guess the tokens of tiny: their tokenizers"), "{other}");
    let gone = serve("gone").unwrap_err().to_string();
    assert!(gone.contains("engine.draft_models names gone"), "{gone}");
    let alone = assembly.load_qualified(&manifest).unwrap().bytes;
    // Half the layers, so half the cache.
    assert!((alone + (1 << 19)..alone + (1 << 20)).contains(&bytes), "{alone} and {bytes}");
    assert!(bytes.abs_diff(expected) < 1 << 18, "{bytes} where {expected} were expected");
}

/// Without a runner that reads along, every position has the same distribution, bit for bit.
#[test]
fn a_text_is_scored_in_the_background_as_it_is_in_a_qualification() {
    let (_data, assembly, manifest, _) = qualified_for(16, 300);
    let source = assembly.catalogue().source(&manifest).unwrap();
    let model = Prover(&assembly).load(&source, &ProductChoices::default()).unwrap();
    let subject = || {
        let subject = EngineSubject::new(&assembly, &manifest, model.clone(), BTreeMap::new());
        subject.unwrap()
    };
    let ids: Vec<u32> = (0..70).map(|i| 3 + i * 7 % 90).collect();
    for path in [ScorePath::Prefill, ScorePath::Decode] {
        let alone = subject().score(1, &ids, path).unwrap();
        let beside = subject().in_background().score(2, &ids, path).unwrap();
        assert!(alone.iter().flatten().count() > 40);
        for (alone, beside) in alone.iter().zip(&beside) {
            let Some(alone) = alone else { continue };
            let beside = beside.as_ref().unwrap();
            assert_eq!(alone.top, beside.top);
            assert!(path == ScorePath::Decode || alone.chosen == beside.chosen);
        }
    }
    let some = subject().in_background().score_at(3, &ids, &[5, 20]).unwrap();
    assert_eq!(some.iter().flatten().count(), 2);
    assert_eq!(some[20], subject().score_at(4, &ids, &[5, 20]).unwrap()[20]);
}

#[test]
fn a_context_rises_and_a_record_is_renewed_over_the_engine_that_serves() {
    let (_data, assembly, manifest, record) = qualified_for(16, 300);
    let now = || assembly.qualified(&manifest, &assembly.host()).unwrap();
    let prove = |due, engine: &EngineHandle| {
        let served = assembly.served_model(now()).unwrap();
        Prover(&assembly).prove_due(&served, engine.clone(), due).unwrap();
    };
    let engine = assembly.load_qualified(&manifest).unwrap().engine;
    assert_eq!(now().qualified_context_tokens(), 300);
    prove(DueProof::Context(1_000), &engine);
    assert_eq!((now().qualified_context_tokens(), now().failed_context()), (1_000, None));
    prove(DueProof::Renewal, &engine);
    let renewed = assembly.catalogue().records(&manifest.name).unwrap().remove(0);
    assert_ne!(renewed.id, record.id);
    let states = |record: &Record| record.checks.iter().map(|c| c.state).collect::<Vec<_>>();
    assert_eq!(states(&renewed), states(&record), "{:?}", renewed.checks);
    assert_eq!((renewed.verdict, renewed.qualified_context_tokens), (record.verdict, 1_000));
    assert_eq!(renewed.canary.len(), record.canary.len());
    // An engine that ends meanwhile says nothing of the model.
    engine.drain();
    prove(DueProof::Context(2_000), &engine);
    prove(DueProof::Renewal, &engine);
    assert_eq!((now().qualified_context_tokens(), now().failed_context()), (1_000, None));
    assert_eq!(assembly.catalogue().records(&manifest.name).unwrap().len(), 2);
}

/// It listed 8 192 tokens and refused 700.
#[test]
fn no_context_is_proven_that_the_cache_cannot_hold() {
    let (_data, assembly, manifest, record) = qualified(1);
    let served = assembly.load_qualified(&manifest).unwrap().engine.options().clone();
    assert_eq!(served.max_context, served.num_blocks * served.block_size);
    assert!(served.max_context < 8192, "the cache is small: {served:?}");
    assert_eq!(record.qualified_context_tokens as usize, served.max_context);
}

#[test]
fn a_model_that_computes_other_tokens_than_its_record_says_is_not_served() {
    let (_data, assembly, manifest, mut record) = qualified(64);
    assembly.load_qualified(&manifest).unwrap();
    let positions = |record: &Record| record.canary.iter().map(|case| case.tokens.len()).sum();
    let all: usize = positions(&record);
    assert_eq!(all, 64);
    let failure = |record: &Record| {
        assembly.catalogue().save_record(record).unwrap();
        assembly.load_qualified(&manifest).err().map(|why| why.kind())
    };
    let last = &mut record.canary[3];
    (last.tokens[9], last.margins[9]) = (last.tokens[9] ^ 1, 1.0);
    record.id = uuid::Uuid::now_v7();
    assert_eq!(failure(&record), Some("wrong_answers"));
    record.canary.clear();
    record.id = uuid::Uuid::now_v7();
    assert_eq!(failure(&record), Some("unproven"), "nothing to compare proves nothing");
}

#[test]
fn a_model_on_a_gpu_is_counted_by_what_it_takes_there() {
    let (_data, mut assembly, manifest, _) = qualified(64);
    let model = assembly.qualified(&manifest, &assembly.host()).unwrap();
    let card = card(model.source()).unwrap();
    let (parameters, weights) = (card.parameters(), card.gpu_bytes);
    // The vectors of five norms stay in f32.
    assert_eq!(weights, 2 * parameters + 2 * 5 * 64);
    let properties = Emulator::card("rtx-3060", 12_000 << 20).unwrap();
    assembly.device = ComputeDevice::Gpu { number: 0, further: Vec::new(), properties };
    let mut check = |change: fn(&mut EngineSettings), budget_mib: u64, bytes: u64| {
        change(&mut assembly.config.engine);
        let found = (assembly.model_budget(), assembly.expected_bytes(&model));
        assert_eq!(found, (budget_mib << 20, bytes));
    };
    // Nine tenths less the reserve; without a size of its own the cache takes the rest.
    check(|_| (), 10_288, 10_288 << 20);
    check(|engine| engine.gpu_kv_mib = 300, 10_288, weights + (300 << 20));
    check(|engine| engine.dequantise = true, 10_288, 4 * parameters + (300 << 20));
    check(|engine| engine.gpu_reserve_mib = 1_000, 9_800, 4 * parameters + (300 << 20));
    check(|engine| engine.memory_mib = 20_000, 9_800, 4 * parameters + (300 << 20));
    check(|engine| engine.memory_mib = 700, 700, 4 * parameters + (300 << 20));
}

/// A record brings the algorithms of its products: no folder of a user has a part in the proof.
#[test]
fn a_gpu_computes_products_as_the_record_of_its_model_says() {
    /// No other test of this process has a GPU.
    const GPU: usize = 7;
    // A build for real GPUs opens no other.
    if gpu::BUILT {
        return;
    }
    Emulator::add_numbered(GPU);
    let (data, mut config) = (tempfile::tempdir().unwrap(), Config::default());
    (config.engine.device, config.engine.max_batched_tokens) = (DeviceSetting::Cuda(GPU), 32);
    (config.engine.max_rows, config.engine.gpu_graph_rows) = (32, 4);
    config.engine.gpu_kv_mib = 8;
    let file = data.path().join("tiny.gguf");
    std::fs::write(&file, TinyLlama::default().gguf().to_bytes()).unwrap();
    let assembly = Assembly::new(data.path().to_owned(), config).unwrap();
    let catalogue = assembly.catalogue();
    let manifest = catalogue.add(&file, None, &inspect, &mut |_| {}).unwrap();
    let examined = || {
        let mut examined = Prover(&assembly).examine(&manifest, Suite::Quick, None).unwrap();
        let canary = canary::of(&mut examined.subject, None).unwrap();
        examined.subject.engine.shutdown();
        examined.identity.host.products = examined.subject.products.lines();
        (examined.identity, canary)
    };
    let (identity, canary) = examined();
    let products = identity.host.products.clone();
    assert!(!products.is_empty());
    let (anew, _) = examined();
    assert!(anew.host.products.is_disjoint(&products), "without a record, each start measures");

    let finished_at = SystemClock.now().seconds();
    let record = Record { canary, finished_at, ..records::with(identity, Verdict::Qualified) };
    catalogue.save_record(&record).unwrap();
    assert_eq!(*assembly.qualified(&manifest, &assembly.host()).unwrap().products(), products);
    let measured = Emulator::measured();
    assembly.load_qualified(&manifest).unwrap().engine.shutdown();
    assert_eq!(examined().0.host.products, products, "the next qualification begins with them");
    assert_eq!(Emulator::measured(), measured, "all is known");
}
