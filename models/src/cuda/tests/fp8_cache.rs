//! Keys and values in floats of eight bits: how far results move, that they depend on nothing but
//! the tokens before, and what a block takes.

use super::*;

/// Heads of 64 values, for which there are kernels.
fn tiny() -> TinyLlama {
    TinyLlama { seed: 21, hidden: 128, heads: 2, kv_heads: 1, ..TinyLlama::default() }
}

fn kept(fp8_cache: bool, deterministic: bool) -> CudaModel {
    let options = ModelOptions { fp8_cache, deterministic, max_rows: 64, ..options(Kind::Bf16) };
    load(&tiny(), &options).unwrap()
}

/// The mean divergence of the distributions of `got` from those of `want`, nats.
fn mean_kl(got: &[Vec<f32>], want: &[Vec<f32>]) -> f32 {
    let logs = |row: &[f32]| {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum = row.iter().map(|x| (x - most).exp()).sum::<f32>().ln() + most;
        row.iter().map(|x| x - sum).collect::<Vec<_>>()
    };
    let of_row = |(got, want): (&Vec<f32>, &Vec<f32>)| {
        logs(want).iter().zip(logs(got)).map(|(p, q)| p.exp() * (p - q)).sum::<f32>()
    };
    got.iter().zip(want).map(of_row).sum::<f32>() / got.len() as f32
}

/// Random weights make attention sharper than trained ones do, so errors of keys show.
#[test]
fn logits_are_close_to_those_of_a_cache_in_bf16() {
    let tokens = tokens(150, 5);
    let [exact, coded] = [false, true].map(|fp8| alone(&mut kept(fp8, false), 0, &tokens, 50));
    let (off, kl) = (error(&coded, &exact), mean_kl(&coded, &exact));
    println!("logits are off by {off}, the mean KL is {kl:e}");
    assert!(0.0 < off && off < 0.12 && kl < 0.1, "{off} {kl}");
}

#[test]
fn chunks_change_no_bit() {
    let tokens = tokens(150, 6);
    let last = |chunk| alone(&mut kept(true, true), 0, &tokens, chunk).pop();
    let whole = last(50);
    assert!(whole.is_some() && last(30) == whole && last(1) == whole);
}

#[test]
fn a_block_takes_half() {
    let [exact, coded] = [false, true].map(|fp8| block_bytes(kept(fp8, false).config(), BLOCK));
    // Two layers of K and V, and the tokens; a scale takes two bytes.
    assert_eq!(exact, 2 * 2 * BLOCK * 64 * 2 + BLOCK * 4);
    assert_eq!(coded, 2 * 2 * BLOCK * (64 + 2) + BLOCK * 4);
}

#[test]
fn other_heads_are_refused() {
    let options = ModelOptions { fp8_cache: true, ..options(Kind::Bf16) };
    let error = load(&TinyLlama::default(), &options).err().unwrap().to_string();
    assert!(error.contains("heads of 16 in a cache of fp8"), "{error}");
}
