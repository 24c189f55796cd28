//! Scene 3: which retry is safe. A payment whose answer never comes, without a key and with one, and a
//! payment that the server's close crosses on the way.
//!
//! The retry layer cannot ask the server what became of it. Without a key it must not guess, so the
//! caller is told; with one it may send the same request again, and the server pays once.

mod crossed;
mod paid;

use idempool::RetryPolicy;

use crate::BoxError;
use crate::client::{Client, Order};
use crate::report::Report;

use super::Target;
use super::witness::Witness;
use paid::{Case, Paid};

/// Plays three payments on a server that loses their answers, and two that its close crosses.
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
    for (case, path, order) in [
        (
            Case::ClosedBefore,
            "/payments?lose=early",
            Order::unkeyed(AMOUNT),
        ),
        (Case::AnswerLost, "/payments?lose=1", Order::unkeyed(AMOUNT)),
        (
            Case::AnswerLostKeyed,
            "/payments?lose=1",
            Order::keyed(AMOUNT),
        ),
    ] {
        rows.push(pay(&client, &witness, case, path, order).await?);
    }
    let crossing_server = crossed::server(target);
    let policy = RetryPolicy::default().resend_not_received(true);
    // A pool that has met a close trusts no unkeyed payment to a connection of that age again; this one has met none.
    let opted_in = Client::with_policy(&target.base_url, target.pool()?.build(), policy);
    if let Ok(server) = crossing_server {
        for (case, client) in [
            (Case::CloseCrosses, &client),
            (Case::CloseCrossesOptedIn, &opted_in),
        ] {
            rows.push(crossed::pay(client, server, &witness, case).await?);
        }
    }
    let (stats, stats_opted_in) = (client.stats(), opted_in.stats());
    let after = witness.read().await?.unwrap_or_default().since(before);

    report.say(
        "closed_before: the server closes before it reads the body. answer_lost: it pays, then closes\n\
         without an answer. From here the two look the same, so neither is sent again.\n\
         answer_lost_keyed: the same loss, but the order carries an idempotency key.",
    )?;
    match crossing_server {
        Ok(_) => report.say(crossed::EXPLAINED)?,
        Err(reason) => report.say(&format!("Left out: the close that crosses; {reason}."))?,
    }
    report.rows(&rows)?;
    for row in &rows {
        row.check(report);
    }
    // The server cannot count what never came.
    let crossed = rows.iter().filter(|row| row.case.is_crossed()).count() as u64;
    report.agree(
        "retry: requests",
        (stats.requests + stats_opted_in.requests).saturating_sub(crossed),
        after.requests,
    );
    report.agree(
        "retry: connections",
        stats.connections_opened + stats_opted_in.connections_opened,
        after.connections,
    );
    let keyed_twice = |row: &Paid| row.case == Case::AnswerLostKeyed && row.made() > 1;
    if rows.iter().any(keyed_twice) {
        report.say(
            "This server does not honour idempotency keys: one order was paid more than once.",
        )?;
    } else if rows.iter().any(|row| row.again.is_some()) {
        report.say(
            "The keyed one was then ordered again with the key that was written down, as a program does\n\
             after a restart: the same answer came back, and nothing was paid.",
        )?;
    }
    report.say(&format!(
        "\nThe pool's statistics of all but the last, as they print:\n\n{stats}"
    ))?;
    Ok(())
}

async fn pay(
    client: &Client,
    witness: &Witness<'_>,
    case: Case,
    path: &str,
    order: Order,
) -> Result<Paid, BoxError> {
    let before = payments(witness).await?;
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

/// In minor units: ten cents.
const AMOUNT: u64 = 10;
