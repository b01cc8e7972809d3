//! async-openai: models, chat and responses, streamed and not, and what it makes of an error.

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{
    ChatCompletionRequestUserMessage, CreateChatCompletionRequest, CreateChatCompletionRequestArgs,
};
use async_openai::types::responses::{CreateResponseArgs, ResponseStreamEvent};
use futures::StreamExt;
use std::error::Error;

fn question(model: &str) -> Result<CreateChatCompletionRequest, OpenAIError> {
    CreateChatCompletionRequestArgs::default()
        .model(model)
        .max_completion_tokens(20_u32)
        .messages([ChatCompletionRequestUserMessage::from("Say hello.").into()])
        .build()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let [_, gateway, key, name] = &std::env::args().collect::<Vec<_>>()[..] else {
        return Err("give the gateway, a key and a model".into());
    };
    let base = format!("{gateway}/v1");
    let config = OpenAIConfig::new().with_api_base(&base).with_api_key(key);
    let client = Client::with_config(config);

    let models = client.models().list().await?;
    assert!(models.data.iter().any(|model| model.id == *name), "{models:?}");
    assert_eq!(client.models().retrieve(name).await?.id, *name);

    let answer = client.chat().create(question(name)?).await?;
    let text = answer.choices[0].message.content.clone().unwrap_or_default();
    assert!(!text.is_empty() && answer.usage.is_some_and(|usage| usage.completion_tokens > 0));

    let mut stream = client.chat().create_stream(question(name)?).await?;
    let mut pieces = String::new();
    while let Some(chunk) = stream.next().await {
        for choice in chunk?.choices {
            pieces.push_str(choice.delta.content.as_deref().unwrap_or_default());
        }
    }
    assert!(!pieces.is_empty());

    let request = || {
        let mut request = CreateResponseArgs::default();
        request.model(name).input("Say hello.").max_output_tokens(20_u32).build()
    };
    let response = client.responses().create(request()?).await?;
    assert!(response.output_text().is_some_and(|text| !text.is_empty()), "{response:?}");
    let mut stream = client.responses().create_stream(request()?).await?;
    let mut is_complete = false;
    while let Some(event) = stream.next().await {
        is_complete |= matches!(
            event?,
            ResponseStreamEvent::ResponseCompleted(_) | ResponseStreamEvent::ResponseIncomplete(_)
        );
    }
    assert!(is_complete);

    let refused = client.chat().create(question("nobody")?).await;
    assert!(matches!(&refused, Err(OpenAIError::ApiError(_))), "{refused:?}");
    let stranger = OpenAIConfig::new().with_api_base(base).with_api_key("cresset_key_none");
    let refused = Client::with_config(stranger).chat().create(question(name)?).await;
    assert!(refused.is_err());
    println!("ok");
    Ok(())
}
