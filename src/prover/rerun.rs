//! Computes the answer of a receipt again, with the release and the parameters that the receipt
//! names, and compares the tokens.

use crate::{Prover, UnqualifiedModel};
use cresset_api::wire::chat_request::ChatRequest;
use cresset_api::wire::json::{JsonTree, fingerprint};
use cresset_api::{COMPLETIONS, ChatLeeway};
use cresset_base::AccountId;
use cresset_catalogue::Manifest;
use cresset_engine::{
    EngineHandle, GenerateRequest, SAMPLING_NUMBERS, SamplingParams, SequenceEvent, StopCause,
};
use cresset_node::{NodeError, cannot_load};
use cresset_request::{
    GenerationInput, PreparedAnswer, ReceiptPredicate, ReceiptStatement, Transcript,
};
use cresset_text::{TextModel, Unwanted};
use std::sync::Arc;

/// What computing an answer again has shown.
#[derive(Debug)]
pub struct RerunOutcome {
    /// The name of the release here.
    pub release: String,
    /// Tokens of the answer that was computed now.
    pub tokens: u32,
    /// Whether they are those of the receipt.
    pub equal: bool,
    /// What is not as it was, or is not known, and may change an answer.
    pub differs: Vec<String>,
}

/// A computed answer.
struct ComputedAnswer {
    tokens: u32,
    digest: String,
}

impl Prover<'_> {
    /// Computes the receipt's answer again from the body that the client sent. Blocking: it loads
    /// the release's weights.
    pub fn rerun(
        &self,
        receipt: &ReceiptStatement,
        body: &[u8],
    ) -> Result<RerunOutcome, NodeError> {
        let said = &receipt.predicate;
        let input = same_input(said, body)?;
        let manifest = self.release_of(said)?;
        let UnqualifiedModel { text, engine, .. } = self.load_release(&manifest)?;
        let answer = compute(said, &input, &text, &engine);
        engine.shutdown();
        let ComputedAnswer { tokens, digest } = answer?;
        let equal = digest == said.answer.tokens_sha256;
        let differs = self.what_differs(said, &manifest);
        Ok(RerunOutcome { release: manifest.name, tokens, equal, differs })
    }

    /// Loads a release whose files are read and compared with its manifest first.
    fn load_release(&self, manifest: &Manifest) -> Result<UnqualifiedModel, NodeError> {
        let catalogue = self.catalogue();
        let digests = catalogue.digests(manifest).map_err(NodeError::new)?;
        let source = catalogue.source(manifest).map_err(NodeError::new)?;
        let source = source.with_digests(digests.blake3);
        let products = self.products_to_check(manifest)?;
        self.load(&source, &products).map_err(|why| cannot_load(&manifest.name, why))
    }

    /// The release here whose files have the digests of the receipt.
    fn release_of(&self, said: &ReceiptPredicate) -> Result<Manifest, NodeError> {
        let all = self.catalogue().manifests().map_err(NodeError::new)?;
        let wanted = &said.release.files_sha256;
        let found = all.into_iter().find(|manifest| manifest.digests().values().eq(wanted));
        found.ok_or_else(|| {
            let id = said.release.id;
            NodeError::new(format!("no release here has the files that the receipt names ({id})"))
                .remedy("fetch it with `cresset models pull` or add it with `cresset models add`")
        })
    }

    /// What may have changed an answer since the receipt's was made.
    fn what_differs(&self, said: &ReceiptPredicate, manifest: &Manifest) -> Vec<String> {
        let mut found = Vec::new();
        let host = self.host();
        if host.engine.executable_sha256 != said.build.executable_sha256 {
            found.push(format!("this is another build than the receipt's {}", said.build.version));
        }
        found.extend(self.what_differs_from_record(said, manifest));
        let engine = &self.config.engine;
        if self.device.properties().is_some() && !engine.deterministic {
            found.push(
                "a GPU without engine.deterministic may choose another of two tokens that are nearly equally likely"
                    .into(),
            );
        }
        found
    }

    /// Hardware and settings are not in a receipt; they stand in the record that it names.
    fn what_differs_from_record(
        &self,
        said: &ReceiptPredicate,
        manifest: &Manifest,
    ) -> Option<String> {
        let catalogue = self.catalogue();
        let records = catalogue.records(&manifest.name).unwrap_or_default();
        let Some(record) = records.iter().find(|record| record.id == said.verdict.record) else {
            let unknown =
                "the hardware and the settings of the receipt's answer are not known here";
            return Some(unknown.into());
        };
        let difference = record.identity.difference(&catalogue.identity(manifest, &self.host()));
        difference.map(|d| format!("the {} was {} and is {}", d.part, d.recorded, d.present))
    }
}

/// The request's input, if the body is that of the receipt's request.
fn same_input(said: &ReceiptPredicate, body: &[u8]) -> Result<GenerationInput, NodeError> {
    let tree = JsonTree::parse(body).map_err(NodeError::new)?;
    let found = fingerprint("POST", COMPLETIONS, said.request.session_id, &tree);
    if hex::encode(found) != said.request.fingerprint {
        return Err(NodeError::new(
            "this body is not the one of the receipt's request: its fingerprint differs",
        )
        .remedy("give the JSON that the client sent, with every member and value as it was"));
    }
    // It may have come through a gateway, with bounds of its own.
    let ChatLeeway { bounds, is_lenient } = ChatLeeway::endless();
    let input = ChatRequest::parse_within(&tree, &bounds).map_err(NodeError::new)?.input;
    Ok(GenerationInput { is_lenient, ..input })
}

/// Computes the answer as the account's plan had it made, which the receipt does not tell: formats
/// and calls of tools begin behind the model's thought, or at once on a plan without reasoning.
fn compute(
    said: &ReceiptPredicate,
    input: &GenerationInput,
    text: &Arc<TextModel>,
    engine: &EngineHandle,
) -> Result<ComputedAnswer, NodeError> {
    let answer = compute_after(true, said, input, text, engine)?;
    let is_constrained = input.format.is_some() || input.tools.is_some();
    let has_another = is_constrained && text.thinking.is_some();
    if answer.digest == said.answer.tokens_sha256 || !has_another {
        return Ok(answer);
    }
    compute_after(false, said, input, text, engine)
}

/// Computes the answer with the model's thought told apart or not.
fn compute_after(
    thinks: bool,
    said: &ReceiptPredicate,
    input: &GenerationInput,
    text: &Arc<TextModel>,
    engine: &EngineHandle,
) -> Result<ComputedAnswer, NodeError> {
    let prepared = input.prepare(text, thinks, &Unwanted::default()).map_err(NodeError::new)?;
    if hex::encode(prepared.digest) != said.prompt.tokens_sha256 {
        return Err(NodeError::new(
            "this build makes other prompt tokens of the body than the receipt tells: its template or tokenizer differ",
        )
        .remedy("use the build that the receipt names"));
    }
    let request = request(said, input, text, &prepared)?;
    let transcript =
        Transcript::new(text.clone(), request.eos_ids.clone(), input.stop.clone(), false);
    generate(engine, &request, transcript.read_by(prepared.reader))
}

/// The generation that the receipt tells of.
fn request(
    said: &ReceiptPredicate,
    input: &GenerationInput,
    text: &TextModel,
    prepared: &PreparedAnswer,
) -> Result<GenerateRequest, NodeError> {
    Ok(GenerateRequest {
        account: AccountId::generate(),
        application: None,
        priority: 0,
        background: false,
        prompt: prepared.prompt.clone(),
        sampling: sampling(said, input)?,
        max_tokens: said.sampling.max_tokens,
        min_tokens: said.sampling.min_tokens,
        eos_ids: input.ends(text).into(),
        grammar: prepared.grammar.clone(),
        deadline: None,
    })
}

fn sampling(said: &ReceiptPredicate, input: &GenerationInput) -> Result<SamplingParams, NodeError> {
    let seed = said.sampling.engine_seed();
    let seed = seed.ok_or_else(|| NodeError::new("the receipt's seed is no number"))?;
    let logit_bias = input.sampling.logit_bias.as_slice().into();
    let mut sampling = SamplingParams { seed, logit_bias, ..SamplingParams::default() };
    for (name, value) in &said.sampling.numbers {
        let number = SAMPLING_NUMBERS.iter().find(|number| number.name == name);
        let number = number.ok_or_else(|| {
            NodeError::new(format!("this build does not know the receipt's parameter {name}"))
        })?;
        number.set(&mut sampling, *value);
    }
    Ok(sampling)
}

fn generate(
    engine: &EngineHandle,
    request: &GenerateRequest,
    mut transcript: Transcript,
) -> Result<ComputedAnswer, NodeError> {
    let (id, mut events) = engine.submit(request.clone()).map_err(NodeError::new)?;
    let cause = loop {
        match events.blocking_recv() {
            Some(SequenceEvent::Started) => {}
            Some(SequenceEvent::Token { id: token, .. }) => {
                transcript.push(token, None);
                if transcript.stopped {
                    engine.stop(id);
                }
            }
            Some(SequenceEvent::Finished(finished)) => break finished.cause,
            None => return Err(NodeError::new("the engine ended without finishing the answer")),
        }
    };
    computed(&cause, &transcript)
}

fn computed(cause: &StopCause, transcript: &Transcript) -> Result<ComputedAnswer, NodeError> {
    let ended = matches!(cause, StopCause::EndOfText | StopCause::Length);
    if !(ended || transcript.stopped) {
        return Err(NodeError::new(format!("the generation ended with {cause:?}")));
    }
    let digest = hex::encode(transcript.token_digest());
    Ok(ComputedAnswer { tokens: transcript.tokens, digest })
}
