//! Goldens that a subject makes of itself, so that a fault planted in it afterwards can be compared
//! with how it was. They prove nothing about the subject.

use crate::checks::PLAIN_TEXTS;
use crate::goldens::{
    Case, Document, DocumentRow, Goldens, GoldensOrigin, TemplateCase, TokenizerCase,
};
use crate::subject::{ChatTurn, Generation, Request, Result, ScorePath, Subject};

/// Tokens that are read of each text, and of each answer.
const READ: usize = 96;
const ANSWER: u32 = 32;
/// The first of the tenants that no check uses.
const FIRST_TENANT: u32 = 1_000_200;
const QUESTIONS: [&str; 4] = [
    "Which river flows through Cairo?",
    "Tell me a story about a lighthouse.",
    "Was kostet ein Brot?",
    "List three numbers below 100.",
];

/// The goldens of a subject whose files have this digest.
pub fn of(subject: &mut dyn Subject, weights_sha256: &str) -> Result<Goldens> {
    let mut goldens = Goldens {
        origin: GoldensOrigin { release: "itself".into(), ..GoldensOrigin::default() },
        weights_sha256: weights_sha256.to_owned(),
        parameters: subject.hyper_parameters()?,
        ends: subject.eos_ids(),
        cases: Vec::new(),
        tokenizer: Vec::new(),
        templates: Vec::new(),
        tool_conversations: Vec::new(),
        documents: Vec::new(),
    };
    for (tenant, text) in (FIRST_TENANT..).zip(PLAIN_TEXTS) {
        goldens.documents.push(document(subject, tenant, text.name, text.text)?);
        goldens.tokenizer.push(tokenized(subject, text.text)?);
    }
    goldens.tokenizer.push(tokenized(subject, "1234567890 <|im_start|>user ééé\n\n\tx = 3.14")?);
    for question in QUESTIONS {
        let messages = vec![ChatTurn::new("system", "Be short."), ChatTurn::new("user", question)];
        goldens.cases.push(case(subject, question, &messages)?);
        let prompt = subject.render(&messages)?;
        goldens.templates.push(TemplateCase { messages, add_generation_prompt: true, prompt });
    }
    Ok(goldens)
}

fn document(subject: &mut dyn Subject, tenant: u32, domain: &str, text: &str) -> Result<Document> {
    let mut ids = subject.encode(text, false)?;
    ids.truncate(READ);
    let scores = subject.score(tenant, &ids, ScorePath::Prefill)?;
    let rows = scores
        .into_iter()
        .enumerate()
        .filter_map(|(position, score)| Some(DocumentRow { position, top: score?.top }));
    Ok(Document { domain: domain.to_owned(), rows: rows.collect(), ids })
}

fn tokenized(subject: &mut dyn Subject, text: &str) -> Result<TokenizerCase> {
    let ids = subject.encode(text, false)?;
    let special_ids = Some(subject.encode(text, true)?).filter(|special| *special != ids);
    Ok(TokenizerCase { text: text.to_owned(), ids, special_ids })
}

fn case(subject: &mut dyn Subject, id: &str, messages: &[ChatTurn]) -> Result<Case> {
    let prompt_ids = subject.encode_chat(messages)?;
    let request = Request::greedy(FIRST_TENANT, &prompt_ids, ANSWER);
    let answer = subject.generate(&[request])?.pop();
    let Generation { tokens, logprobs, .. } =
        answer.ok_or_else(|| crate::SubjectError::Failed("no answer".into()))?;
    let top2 = logprobs.iter().filter_map(|one| one.top.first_chunk::<2>().copied()).collect();
    Ok(Case {
        id: id.to_owned(),
        messages: messages.to_vec(),
        prompt_ids,
        greedy_ids: tokens,
        top2,
    })
}
