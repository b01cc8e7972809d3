//! The cost of formats: answers that keep to one, beside the same number of answers without.

use crate::answers::{self, request};
use crate::model::Loaded;
use crate::targets::{FORMAT_OF_ONE, FORMATS, Target, row};
use crate::{Result, tokens};
use cresset_engine::{EngineOptions, TokenGrammar, TokenMask};
use std::hint::spin_loop;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time that a grammar takes for a mask, as those of schemas do.
const MASK_TIME: Duration = Duration::from_micros(50);
const PROMPT: usize = 16;

/// Allows even and odd ids in turns.
#[derive(Clone, Debug)]
struct TurnsGrammar([Arc<[u32]>; 2]);

impl TurnsGrammar {
    fn new(vocab_size: usize) -> Self {
        Self([0x5555_5555, 0xaaaa_aaaa].map(|word| vec![word; vocab_size.div_ceil(32)].into()))
    }
}

impl TokenGrammar for TurnsGrammar {
    fn begin(&self) -> Arc<dyn TokenMask> {
        Arc::new(self.clone())
    }
}

impl TokenMask for TurnsGrammar {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        let start = Instant::now();
        while start.elapsed() < MASK_TIME {
            spin_loop();
        }
        Ok(self.0[output.len() % 2].clone())
    }
}

/// Answers of `len` tokens each, for one row and for `most`.
pub fn formats(loaded: &Loaded, most: usize, len: usize) -> Result<()> {
    for (rows, target) in [(1, FORMAT_OF_ONE), (most, FORMATS)] {
        compare(loaded, rows, len, target)?;
    }
    Ok(())
}

fn compare(loaded: &Loaded, rows: usize, len: usize, target: Target) -> Result<()> {
    let vocab_size = loaded.info.config.vocab_size;
    let engine = loaded.engine(EngineOptions { max_rows: rows, ..loaded.options() });
    let grammar: Arc<dyn TokenGrammar> = Arc::new(TurnsGrammar::new(vocab_size));
    let rate = |grammar: Option<&Arc<dyn TokenGrammar>>| -> Result<f64> {
        let prompts = (0..rows).map(|i| request(tokens(i, PROMPT, vocab_size), len));
        let requests = prompts.map(|plain| {
            let grammar = grammar.cloned();
            cresset_engine::GenerateRequest { grammar, ..plain }
        });
        let (answers, seconds) = answers::ask_all(&engine, requests.collect())?;
        let keeps = |(at, id): (usize, &u32)| *id as usize % 2 == at % 2;
        let kept = answers.iter().all(|answer| answer.tokens.iter().enumerate().all(keeps));
        if grammar.is_some() && !kept {
            return Err("an answer does not keep to its format".into());
        }
        Ok((rows * len) as f64 / seconds)
    };
    // The first round puts the prompts into the cache.
    rate(None)?;
    let (plain, masked) = (rate(None)?, rate(Some(&grammar))?);
    answers::end(&engine)?;
    let measured = format!("{masked:.1} tok/s, {plain:.1} without");
    row(format!("{rows} answers with a format"), measured, "", &[(target, masked / plain)]);
    Ok(())
}
