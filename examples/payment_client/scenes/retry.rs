//! Scene 3: which retry is safe. A payment whose answer never comes, without a key and with one.
//!
//! The retry layer cannot ask the server what became of it. Without a key it must not guess, so the
//! caller is told; with one it may send the same request again, and the server pays once.

use http::StatusCode;
use idempool::{Delivery, Error};
use serde_json::Value;

use crate::BoxError;
use crate::client::{Answer, Client, Order, what_now};
use crate::report::{Column, Report, Row, or_dash};

use super::Target;
use super::witness::Witness;

/// Plays three payments on a server that loses their answers.
pub(crate) async fn play(target: &Target, report: &mut Report<'_>) -> Result<(), BoxError> {
    report.title("3. Which retry is safe")?;
    let witness = Witness::new(target)?;
    let Some(before) = witness.read().await? else {
        return Ok(report.say(
            "Skipped: GET /payments does not answer {\"payments\":N,\"requests\":M,\"connections\":C}.",
        )?);
    };
    let client = Client::new(&target.base_url, target.pool()?.build());
    let mut rows = Vec::new();
    for case in [Case::ClosedBefore, Case::AnswerLost, Case::AnswerLostKeyed] {
        rows.push(pay(&client, &witness, case).await?);
    }
    let stats = client.stats();
    let after = witness.read().await?.unwrap_or_default().since(before);

    report.say(
        "closed_before: the server closes before it reads the body. answer_lost: it pays, then closes\n\
         without an answer. From here the two look the same, so neither is sent again.\n\
         answer_lost_keyed: the same loss, but the order carries an idempotency key.",
    )?;
    report.rows(&rows)?;
    for row in &rows {
        row.check(report);
    }
    report.agree("retry: requests", stats.requests, after.requests);
    report.agree(
        "retry: connections",
        stats.connections_opened,
        after.connections,
    );
    if rows.iter().any(|row| row.made() > 1) {
        report.say(
            "This server does not honour idempotency keys: one order was paid more than once.",
        )?;
    } else if rows.iter().any(|row| row.again.is_some()) {
        report.say(
            "The last one was then ordered again with the key that was written down, as a program does\n\
             after a restart: the same answer came back, and nothing was paid.",
        )?;
    }
    report.say(&format!(
        "\nThe pool's statistics of this scene, as they print:\n\n{stats}"
    ))?;
    Ok(())
}

async fn pay(client: &Client, witness: &Witness<'_>, case: Case) -> Result<Paid, BoxError> {
    let before = payments(witness).await?;
    let (path, order) = match case {
        Case::ClosedBefore => ("/payments?lose=early", Order::unkeyed(AMOUNT)),
        Case::AnswerLost => ("/payments?lose=1", Order::unkeyed(AMOUNT)),
        Case::AnswerLostKeyed => ("/payments?lose=1", Order::keyed(AMOUNT)),
    };
    // A program writes it into its database here: before anything is sent.
    let written_down = order.key().map(str::to_owned);
    let outcome = client.send(client.payment(path, &order)?).await;
    let after = payments(witness).await?;

    // Only if it was paid once: a server that forgot the key would pay again.
    let again = match written_down {
        Some(key) if outcome.is_ok() && after == before + 1 => {
            let order = Order::restored(AMOUNT, &key)?;
            Some(client.send(client.payment(path, &order)?).await?)
        }
        _ => None,
    };
    Ok(Paid {
        case,
        before,
        after,
        outcome,
        again,
        in_the_end: payments(witness).await?,
    })
}

async fn payments(witness: &Witness<'_>) -> Result<u64, BoxError> {
    let counts = witness.read().await?.ok_or("the server stopped counting")?;
    Ok(counts.payments)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Case {
    ClosedBefore,
    AnswerLost,
    AnswerLostKeyed,
}

impl Case {
    fn as_str(self) -> &'static str {
        match self {
            Self::ClosedBefore => "closed_before",
            Self::AnswerLost => "answer_lost",
            Self::AnswerLostKeyed => "answer_lost_keyed",
        }
    }
}

/// What became of one order to pay.
#[derive(Debug)]
struct Paid {
    case: Case,
    before: u64,
    after: u64,
    outcome: Result<Answer, Error>,
    /// The answer to the same order with the same key, sent once more by hand.
    again: Option<Answer>,
    /// Payments after that.
    in_the_end: u64,
}

impl Paid {
    /// Payments made for this one order.
    fn made(&self) -> u64 {
        self.in_the_end.saturating_sub(self.before)
    }

    fn check(&self, report: &mut Report<'_>) {
        let name = self.case.as_str();
        let due = u64::from(self.case != Case::ClosedBefore);
        let made = self.made();
        report.expect(made >= due, || format!("{name}: the payment was lost"));
        report.expect(made <= due, || {
            let keyless = match self.case {
                Case::AnswerLostKeyed => "; this server does not honour idempotency keys",
                _ => "",
            };
            format!("{name}: {made} payments for one order, expected {due}{keyless}")
        });
        let is_told = match (&self.outcome, self.case) {
            (Ok(answer), Case::AnswerLostKeyed) => {
                let stored =
                    |answer: &Answer| answer.status == StatusCode::CREATED && answer.is_replayed;
                let again = self.again.as_ref();
                stored(answer)
                    && again.is_some_and(|again| stored(again) && again.body == answer.body)
            }
            (Err(error), Case::ClosedBefore | Case::AnswerLost) => {
                error.delivery() == Delivery::Unknown && self.attempts() == 1
            }
            _ => false,
        };
        report.expect(is_told, || match &self.outcome {
            Ok(answer) => format!("{name}: answered {}", answer.status),
            Err(error) => format!("{name}: {error}"),
        });
    }

    fn attempts(&self) -> u32 {
        match &self.outcome {
            Ok(answer) => answer.attempts,
            Err(error) => 1 + error.resends(),
        }
    }

    fn delivery(&self) -> Option<Delivery> {
        self.outcome.as_ref().err().map(Error::delivery)
    }

    fn told(&self) -> String {
        match &self.outcome {
            Ok(answer) if answer.is_replayed => {
                format!(
                    "{}: paid; this is the stored answer",
                    answer.status.as_u16()
                )
            }
            Ok(answer) => answer.status.to_string(),
            Err(error) => what_now(error).to_owned(),
        }
    }
}

impl Row for Paid {
    const COLUMNS: &'static [Column] = &[
        Column::Left("case"),
        Column::Right("payments"),
        Column::Right("attempts"),
        Column::Left("delivery"),
        Column::Left("the caller is told"),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.case.as_str().to_owned(),
            format!("{} -> {}", self.before, self.after),
            self.attempts().to_string(),
            or_dash(self.delivery()),
            self.told(),
        ]
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let answer = self.outcome.as_ref().ok();
        vec![
            ("scene", "retry".into()),
            ("case", self.case.as_str().into()),
            ("payments_before", self.before.into()),
            ("payments_after", self.after.into()),
            ("attempts", self.attempts().into()),
            (
                "outcome",
                if answer.is_some() { "ok" } else { "error" }.into(),
            ),
            ("delivery", self.delivery().map(Delivery::as_str).into()),
            ("status", answer.map(|answer| answer.status.as_u16()).into()),
            ("replayed", answer.map(|answer| answer.is_replayed).into()),
        ]
    }
}

/// In minor units: ten cents.
const AMOUNT: u64 = 10;
