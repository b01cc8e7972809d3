//! The sampling parameters of a release: those of `SAMPLING_NUMBERS` that a release may set.

use cresset_kernels::sampling::params::{
    NumberField, SAMPLING_NUMBERS, SamplingNumber, SamplingParams,
};
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{SerializeMap, Serializer};
use std::collections::BTreeMap;

pub(super) fn numbers() -> impl Iterator<Item = &'static SamplingNumber> {
    SAMPLING_NUMBERS.iter().filter(|number| number.in_releases)
}

pub(super) fn serialize<S: Serializer>(
    params: &SamplingParams,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    for number in numbers() {
        let value = number.get(params);
        match number.field {
            NumberField::Count(_) => map.serialize_entry(number.name, &(value as u32))?,
            // As f32, so that 0.6 is written as it was read.
            _ => map.serialize_entry(number.name, &(value as f32))?,
        }
    }
    map.end()
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<SamplingParams, D::Error> {
    let mut params = SamplingParams::default();
    for (name, value) in BTreeMap::<String, f64>::deserialize(deserializer)? {
        let Some(number) = numbers().find(|number| number.name == name) else {
            let known: Vec<&str> = numbers().map(|number| number.name).collect();
            let known = known.join(", ");
            return Err(D::Error::custom(format!("generation.{name} is not one of {known}")));
        };
        if !number.allows(value) {
            let SamplingNumber { least, most, .. } = number;
            let text = format!("generation.{name} = {value} must be from {least} to {most}");
            return Err(D::Error::custom(text));
        }
        number.set(&mut params, value);
    }
    Ok(params)
}
