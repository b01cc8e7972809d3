//! Tiny random models with a head that guesses tokens, and what it guesses.

use crate::goldens::GoldenModel;
use candle_core::{Device, Tensor};
use serde::Deserialize;

const CASES: &str = include_str!("../../goldens/guesses.json");
const LOGITS: &[u8] = include_bytes!("../../goldens/guesses.safetensors");

#[derive(Deserialize)]
struct GuessGoldens {
    cases: Vec<GuessGolden>,
}

#[derive(Deserialize)]
pub struct GuessGolden {
    #[serde(flatten)]
    pub model: GoldenModel,
    /// The tokens that the head guesses one after the other behind all tokens, each the likeliest.
    pub guesses: Vec<u32>,
    /// The logits of the head: at each position but the last, with the token behind it, and then
    /// with each of its guesses but the last.
    #[serde(skip)]
    pub logits: Vec<Vec<f32>>,
}

/// All of them.
pub fn guess_goldens() -> candle_core::Result<Vec<GuessGolden>> {
    let goldens: GuessGoldens = serde_json::from_str(CASES).map_err(candle_core::Error::wrap)?;
    let logits = candle_core::safetensors::load_buffer(LOGITS, &Device::Cpu)?;
    let with_logits = |case: GuessGolden| {
        let logits = logits.get(&case.model.name).map(Tensor::to_vec2).transpose()?;
        Ok(GuessGolden { logits: logits.unwrap_or_default(), ..case })
    };
    goldens.cases.into_iter().map(with_logits).collect()
}
